"""MLflow: one MLflow run for each training run, on a server, in a database or in files."""

from __future__ import annotations

import getpass
import json
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from hvdtrain.errors import UsageError
from hvdtrain.train.tracking.background import BackgroundWorker
from hvdtrain.train.tracking.files import load_json, save_json
from hvdtrain.train.tracking.masking import one_line
from hvdtrain.train.tracking.mlflow_store import Store, open_store
from hvdtrain.train.tracking.tracker import RunInfo, Status

KEPT = "mlflow.json"
_EXPERIMENT = "hvdtrain"
_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# MLflow's limits.
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_LONGEST_NAME = 250
_LONGEST_VALUE = 6000
_MOST_PARAMETERS = 100
_MOST_METRICS = 1000

_MOST_WAITING_METRICS = 100_000
_PATIENCE_SECONDS = 300.0
_SHORT_PATIENCE_SECONDS = 10.0


class Mlflow:
    """Tracker that writes to an MLflow run, on a thread of its own.

    The run is a child of the active run of this process, or else of the one that MLFLOW_RUN_ID
    names. Its id is saved in the directory, where a resume finds it. Values that a server rejects
    are sent again with the next ones.
    """

    def __init__(
        self, info: RunInfo, uri: str | None, experiment: str | None, run_name: str | None
    ) -> None:
        self._store = open_store(uri)
        try:
            self._run_id = _resume(self._store, info) or _begin(
                self._store, info, experiment, run_name or info.name
            )
            _log_parameters(self._store, self._run_id, info)
            for key, text in info.tags.items():
                self._store.client.set_tag(self._run_id, f"hvdtrain.{_name(key)}", _text(text))
        except MlflowException as error:
            self._store.close()
            raise UsageError(f"--track mlflow: {self._store.uri}: {one_line(error)}") from error
        except BaseException:
            self._store.close()
            raise
        self._waiting: deque[Metric] = deque(maxlen=_MOST_WAITING_METRICS)
        self._rejection: Exception | None = None  # of the waiting values
        self._sender = BackgroundWorker("mlflow")

    @property
    def location(self) -> str:
        """The run and its store."""
        return f"run {self._run_id} in {self._store.uri}"

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Send values, with the time of this call; see Tracker.log."""
        now = int(time.time() * 1000)
        self._waiting.extend(Metric(_name(key), value, now, step) for key, value in values.items())
        self._sender.put(self._send_metrics)
        self._raise_error()

    def artifact(self, path: Path) -> None:
        """Send a file."""
        self._sender.put(
            partial(self._store.client.log_artifact, self._run_id, str(path.absolute()))
        )
        self._raise_error()

    def end(self, status: Status) -> None:
        """Wait until everything is sent: minutes after a finished run, else seconds."""
        client = self._store.client
        self._sender.put(self._send_metrics)
        self._sender.put(partial(client.set_terminated, self._run_id, _STATUS[status]))
        patient = status == "finished" and self._store.answers()
        done = self._sender.close(_PATIENCE_SECONDS if patient else _SHORT_PATIENCE_SECONDS)
        self._store.close()
        if self._waiting or not done:
            raise RuntimeError(
                f"{len(self._waiting)} values, files or the end of the run were not taken by "
                f"{self._store.uri} in time"
            )
        self._raise_error()

    def _send_metrics(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), _MOST_METRICS)
            batch = [self._waiting.popleft() for _ in range(count)]
            try:
                self._store.client.log_batch(self._run_id, metrics=batch)
            except Exception as error:
                self._waiting.extendleft(reversed(batch))
                self._rejection = error
                return
        self._rejection = None

    def _raise_error(self) -> None:
        error = self._sender.take_error() or self._rejection
        if error is not None:
            raise error


def _resume(store: Store, info: RunInfo) -> str | None:
    """Reopen the run that is saved in the directory; return None if there is none."""
    path = info.directory / KEPT
    old = load_json(path, "run_id")
    if old is None:
        return None
    run_id = old["run_id"]
    try:
        run = store.client.get_run(run_id)
    except MlflowException as error:
        raise UsageError(
            f"run {run_id} of {path} was in {old.get('tracking_uri')}, and is not in {store.uri}: "
            "give the --tracking-uri of then, or remove that file to begin a new run"
        ) from error
    if run.info.lifecycle_stage != "active":
        raise UsageError(
            f"run {run_id} of {path} was deleted in {store.uri}: restore it, or remove that file "
            "to begin a new run"
        )
    store.client.update_run(run_id, status="RUNNING")
    return run_id


def _begin(store: Store, info: RunInfo, experiment: str | None, run_name: str) -> str:
    client = store.client
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.name": "hvdtrain",
        "hvdtrain.directory": str(info.directory.absolute()),
    }
    parent_id = _parent_id()
    if parent_id is not None:
        try:
            parent = client.get_run(parent_id)
        except MlflowException as error:
            raise UsageError(
                f"the parent run {parent_id} (active, or named by MLFLOW_RUN_ID) is not in "
                f"{store.uri}: give its --tracking-uri, or unset MLFLOW_RUN_ID"
            ) from error
        tags["mlflow.parentRunId"] = parent_id
    if experiment is None and parent_id is not None:
        experiment_id = parent.info.experiment_id
    else:
        experiment_id = _experiment_id(store, experiment)
    run_id: str = client.create_run(experiment_id, tags=tags, run_name=run_name).info.run_id
    save_json(info.directory / KEPT, {"run_id": run_id, "tracking_uri": store.uri})
    return run_id


def _parent_id() -> str | None:
    active = mlflow.active_run()
    run_id: str | None = active.info.run_id if active else os.environ.get("MLFLOW_RUN_ID")
    return run_id or None


def _experiment_id(store: Store, name: str | None) -> str:
    if name is None and (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID")):
        return experiment_id
    name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
    found = store.client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(store.client.create_experiment(name))
        except MlflowException:  # another job created it first
            found = store.client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _log_parameters(store: Store, run_id: str, info: RunInfo) -> None:
    """Log parameters; those that a resume has changed, which MLflow rejects, go into a tag."""
    old: Mapping[str, str] = store.client.get_run(run_id).data.params
    new = {_name(key): _text(value) for key, value in info.parameters.items()}
    added = [Param(key, value) for key, value in new.items() if key not in old]
    for start in range(0, len(added), _MOST_PARAMETERS):
        store.client.log_batch(run_id, params=added[start : start + _MOST_PARAMETERS])
    changed = {key: value for key, value in new.items() if old.get(key, value) != value}
    if changed:
        key = f"hvdtrain.changed_at_step_{info.resumed_step or 0}"
        tag = RunTag(key, json.dumps(changed)[:_LONGEST_VALUE])
        store.client.log_batch(run_id, tags=[tag])


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]


def _text(value: object) -> str:
    return str(value)[:_LONGEST_VALUE]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for it
        return str(os.getuid())
