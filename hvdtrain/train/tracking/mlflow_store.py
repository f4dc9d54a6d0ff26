"""The store of MLflow runs: checked, opened, and never printed with a password."""

from __future__ import annotations

import logging
import os
import ssl
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.tracking import MlflowClient

from hvdtrain.errors import UsageError
from hvdtrain.train.tracking.masking import masked, one_line

_SERVERS = ("http", "https")
_DATABASES = ("postgresql", "mysql", "sqlite", "mssql")
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class Store:
    """An open store."""

    client: MlflowClient
    uri: str
    _before: Mapping[str, str | None]

    def answers(self) -> bool:
        """Return whether the store can be reached now, within seconds."""
        return not _is_server(self.uri) or _problem_of_server(self.uri) is None

    def close(self) -> None:
        """Restore MLflow's environment variables."""
        _set(self._before)


def open_store(uri: str | None) -> Store:
    """Open a store.

    Until it is closed, the environment holds variables that give MLflow user and password and keep
    it from printing an address.
    """
    uri, variables = _without_credentials(uri or mlflow.get_tracking_uri())
    _require_reachable(uri)
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
    return Store(client, masked(uri), before)


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


def _require_reachable(uri: str) -> None:
    """Check before MLflow does, which would retry for minutes."""
    problem = None
    if _is_server(uri):
        problem = _problem_of_server(uri)
    elif _scheme(uri) in _DATABASES:
        problem = _problem_of_database(uri)
    if problem is not None:
        raise UsageError(f"--track mlflow: {masked(uri)} cannot be reached: {masked(problem)}")


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
