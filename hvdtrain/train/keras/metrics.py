"""Which metrics of Keras add up over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hvdtrain.errors import UsageError

__all__ = ["require_adding_metrics"]

# Each update adds sums over the batch to the variables of these, which start at zero.
_ADDING = (
    keras.metrics.Mean,  # and with it the accuracies, errors, losses and similarities
    keras.metrics.Sum,
    keras.metrics.TruePositives,
    keras.metrics.TrueNegatives,
    keras.metrics.FalsePositives,
    keras.metrics.FalseNegatives,
    keras.metrics.Precision,
    keras.metrics.Recall,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.AUC,
    keras.metrics.FBetaScore,
    keras.metrics.IoU,
)


def require_adding_metrics(metrics: Mapping[str, Any]) -> None:
    """Check that the variables of metrics add up over ranks (local).

    Args:
        metrics: of keras.metrics, by name. One of the user's own says `adds_up = True`, an
            attribute, where each update adds sums over the batch to variables that start at 0.

    Raises:
        UsageError: one of them does not, as far as is known.
    """
    for name, metric in metrics.items():
        if not isinstance(metric, _ADDING) and not getattr(metric, "adds_up", False):
            raise UsageError(
                f"metric {name!r} is a {type(metric).__name__}, whose variables are not known to "
                "add up over ranks: derive it from keras.metrics.Mean, or, if each update only "
                "adds sums over the batch to them, give its class the attribute adds_up = True"
            )
