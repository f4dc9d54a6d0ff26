"""MLflow: one MLflow run for each training run, on a server, in a database or in files."""

from __future__ import annotations

import getpass
import json
import logging
import os
import queue
import re
import ssl
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from hvdtrain.errors import UsageError
from hvdtrain.train.tracking.tracker import RunInfo, Status, load_json, masked, one_line, save_json

_SERVERS = ("http", "https")
_DATABASES = ("postgresql", "mysql", "sqlite", "mssql")
_TIMEOUT_SECONDS = 10.0


def _open_store(uri: str | None) -> tuple[MlflowClient, str, Mapping[str, str | None]]:
    """Open a store; return its address, and the variables that are to be set again at the end.

    Until then, the environment holds those that give MLflow user and password and keep it from
    printing an address.
    """
    uri, variables = _without_credentials(uri or mlflow.get_tracking_uri())
    # Check before MLflow does, which would retry for minutes.
    problem = None
    if _is_server(uri):
        problem = _problem_of_server(uri)
    elif _scheme(uri) in _DATABASES:
        problem = _problem_of_database(uri)
    if problem is not None:
        raise UsageError(f"--track mlflow: {masked(uri)} cannot be reached: {masked(problem)}")
    # Nothing is printed with --quiet, and SQLAlchemy 2.1 warns about MLflow's queries.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)  # now, rather than in the middle
    except Exception as error:  # its own, SQLAlchemy's and those of plugins have no common base
        _set(before)
        raise UsageError(f"--track mlflow: {masked(uri)}: {one_line(error)}") from error
    return client, masked(uri), before


def _without_credentials(uri: str) -> tuple[str, dict[str, str | None]]:
    """Move user and password of a server's address to the variables that MLflow reads."""
    variables: dict[str, str | None] = {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
    if _is_server(uri):
        try:
            parts = urlsplit(uri)
        except ValueError as error:
            raise UsageError(f"--tracking-uri {masked(uri)}: {error}") from error
        if parts.username and parts.password:
            variables["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
            variables["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password)
            uri = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return uri, variables


def _problem_of_server(uri: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError:  # it answers; the client will report the error
        return None
    except urllib.error.URLError as error:
        # MLflow has settings of its own for certificates.
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except (OSError, ValueError) as error:
        return str(error)


def _problem_of_database(uri: str) -> str | None:
    try:
        import sqlalchemy
    except ImportError:
        return "mlflow-skinny alone has no databases: pip install mlflow"
    try:
        url = sqlalchemy.engine.make_url(uri)
        if url.get_backend_name() == "sqlite" and url.database:
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        engine = sqlalchemy.create_engine(url)
        engine.connect().close()
        engine.dispose()
    except Exception as error:  # each driver raises its own
        return one_line(error)
    return None


def _is_server(uri: str) -> bool:
    return _scheme(uri) in _SERVERS


def _scheme(uri: str) -> str:
    return uri.partition(":")[0].partition("+")[0].lower()


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


KEPT = "mlflow.json"
_EXPERIMENT = "hvdtrain"
_STATUS: Mapping[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# MLflow's limits.
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_LONGEST_NAME = 250
_LONGEST_VALUE = 6000
_MOST_PARAMETERS = 100
_MOST_METRICS = 1000

_MOST_JOBS = 10_000
_MOST_WAITING_METRICS = 100_000
_PATIENCE_SECONDS = 300.0
_SHORT_PATIENCE_SECONDS = 10.0


class Mlflow:
    """Tracker that writes to an MLflow run, on a thread that the process does not wait for.

    The run is a child of the active run of this process, or else of the one that MLFLOW_RUN_ID
    names. Its id is saved in the directory, where a resume finds it. Values that a server rejects
    are sent again with the next ones.
    """

    def __init__(
        self, info: RunInfo, uri: str | None, experiment: str | None, run_name: str | None
    ) -> None:
        self._client, self._uri, self._before = _open_store(uri)
        try:
            self._run_id = self._resume(info) or self._begin(
                info, experiment, run_name or info.name
            )
            self._log_parameters(info)
            for key, text in info.tags.items():
                self._client.set_tag(self._run_id, f"hvdtrain.{_name(key)}", _text(text))
        except MlflowException as error:
            _set(self._before)
            raise UsageError(f"--track mlflow: {self._uri}: {one_line(error)}") from error
        except BaseException:
            _set(self._before)
            raise
        self._waiting: deque[Metric] = deque(maxlen=_MOST_WAITING_METRICS)
        self._rejection: Exception | None = None  # of the waiting values
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_JOBS)
        self._error: Exception | None = None  # the newest that is not raised yet
        self._thread = threading.Thread(target=self._run, name="hvdtrain-mlflow", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        now = int(time.time() * 1000)
        self._waiting.extend(Metric(_name(key), value, now, step) for key, value in values.items())
        self._jobs.put_nowait(self._send_metrics)
        self._raise_error()

    def artifact(self, path: Path) -> None:
        file = str(path.absolute())
        self._jobs.put_nowait(partial(self._client.log_artifact, self._run_id, file))
        self._raise_error()

    def end(self, status: Status) -> None:
        """Wait until everything is sent: minutes after a finished run, else seconds."""
        self._jobs.put_nowait(self._send_metrics)
        self._jobs.put_nowait(partial(self._client.set_terminated, self._run_id, _STATUS[status]))
        patient = status == "finished" and (
            not _is_server(self._uri) or _problem_of_server(self._uri) is None
        )
        patience = _PATIENCE_SECONDS if patient else _SHORT_PATIENCE_SECONDS
        with suppress(queue.Full):
            self._jobs.put(None, timeout=patience)
            self._thread.join(patience)
        _set(self._before)
        if self._waiting or self._thread.is_alive():
            raise RuntimeError(
                f"{len(self._waiting)} values, files or the end of the run were not taken by "
                f"{self._uri} in time"
            )
        self._raise_error()

    def _run(self) -> None:
        """Run jobs in order; one that fails does not prevent the next."""
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._error = error

    def _send_metrics(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), _MOST_METRICS)
            batch = [self._waiting.popleft() for _ in range(count)]
            try:
                self._client.log_batch(self._run_id, metrics=batch)
            except Exception as error:
                self._waiting.extendleft(reversed(batch))
                self._rejection = error
                return
        self._rejection = None

    def _raise_error(self) -> None:
        error, self._error = self._error or self._rejection, None
        if error is not None:
            raise error

    def _resume(self, info: RunInfo) -> str | None:
        """Reopen the run that is saved in the directory; return None if there is none."""
        path = info.directory / KEPT
        old = load_json(path, "run_id")
        if old is None:
            return None
        run_id = old["run_id"]
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            raise UsageError(
                f"run {run_id} of {path} was in {old.get('tracking_uri')}, and is not in "
                f"{self._uri}: pass the earlier --tracking-uri, or remove that file to start a "
                "new run"
            ) from error
        if run.info.lifecycle_stage != "active":
            raise UsageError(
                f"run {run_id} of {path} was deleted in {self._uri}: restore it, or remove that "
                "file to begin a new run"
            )
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _begin(self, info: RunInfo, experiment: str | None, run_name: str) -> str:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container may have no name for it
            user = str(os.getuid())
        tags = {
            "mlflow.user": user,
            "mlflow.source.name": "hvdtrain",
            "hvdtrain.directory": str(info.directory.absolute()),
        }
        active = mlflow.active_run()
        parent_id = active.info.run_id if active else os.environ.get("MLFLOW_RUN_ID") or None
        if parent_id is not None:
            try:
                parent = self._client.get_run(parent_id)
            except MlflowException as error:
                raise UsageError(
                    f"the parent run {parent_id} (active, or named by MLFLOW_RUN_ID) is not in "
                    f"{self._uri}: give its --tracking-uri, or unset MLFLOW_RUN_ID"
                ) from error
            tags["mlflow.parentRunId"] = parent_id
        if experiment is None and parent_id is not None:
            experiment_id = parent.info.experiment_id
        else:
            experiment_id = self._experiment_id(experiment)
        run_id: str = self._client.create_run(
            experiment_id, tags=tags, run_name=run_name
        ).info.run_id
        save_json(info.directory / KEPT, {"run_id": run_id, "tracking_uri": self._uri})
        return run_id

    def _experiment_id(self, name: str | None) -> str:
        if name is None and (experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return experiment_id
        name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another job created it first
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_parameters(self, info: RunInfo) -> None:
        """Log parameters; those that a resume has changed, which MLflow rejects, go into a tag."""
        old: Mapping[str, str] = self._client.get_run(self._run_id).data.params
        new = {_name(key): _text(value) for key, value in info.parameters.items()}
        added = [Param(key, value) for key, value in new.items() if key not in old]
        for start in range(0, len(added), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=added[start : start + _MOST_PARAMETERS])
        changed = {key: value for key, value in new.items() if old.get(key, value) != value}
        if changed:
            key = f"hvdtrain.changed_at_step_{info.resumed_step or 0}"
            tag = RunTag(key, json.dumps(changed)[:_LONGEST_VALUE])
            self._client.log_batch(self._run_id, tags=[tag])


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]


def _text(value: object) -> str:
    return str(value)[:_LONGEST_VALUE]
