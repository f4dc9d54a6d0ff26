"""The variables by which MLflow on a rank goes on with the run that the driver has begun."""

from __future__ import annotations

import sys


def tracking_variables() -> dict[str, str]:
    """Return the variables of the active run of MLflow; none if there is no such run."""
    mlflow = sys.modules.get("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    if mlflow is None or run is None:
        return {}
    return {
        "MLFLOW_TRACKING_URI": mlflow.get_tracking_uri(),
        "MLFLOW_RUN_ID": run.info.run_id,
    }
