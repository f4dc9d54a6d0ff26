"""MLflow for real: a database, files and a server."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.train.tracking.tracker import RunInfo
from hvdtrain.train.tracking.trackers import Trackers, open_trackers

START_SECONDS = 300
# A store has as much time as it needs, however slow the machine is.
SHORT_PATIENCE_SECONDS = 290.0


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, where MLflow puts artifacts of a database."""
    from hvdtrain.train.tracking import mlflow

    monkeypatch.setattr(mlflow, "_SHORT_PATIENCE_SECONDS", SHORT_PATIENCE_SECONDS)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.lstrip("_").startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a database for several tests: making one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def facts(directory: Path, resumed_step: int | None = None, **parameters: Any) -> RunInfo:
    directory.mkdir(exist_ok=True)
    return RunInfo(
        "digits", directory, {"lr": 0.1, "uri": "http://me:secret@h", **parameters}, resumed_step
    )


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def only_run(uri: str, experiment: str) -> Any:
    found = client(uri).get_experiment_by_name(experiment)
    (run,) = client(uri).search_runs([found.experiment_id])
    return run


def history(uri: str, run: Any, name: str) -> list[tuple[int, float]]:
    metrics = client(uri).get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value) for metric in metrics)


def test_a_run_in_a_database_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With more than one call of MLflow takes, names and values it refuses, other parameters."""
    uri, directory, said = f"sqlite:///{tmp_path}/new/mlflow.db", tmp_path / "run", list[str]()
    many = {f"option_{number}": number for number in range(150)}
    given = facts(directory, epochs=3, text="x" * 9000, **many)
    first = open_trackers("mlflow", given, uri, "first", warn=said.append)
    for step in range(1500):
        first.log({"train/loss": step / 3}, step, step / 10)
    first.log({"test/top@5": math.nan}, 1500, 150.0)
    first.end("stopped")
    told = replace(facts(directory, 1400, epochs=4), tags={"lost_at_step_1400": "rank 1 ended"})
    second = open_trackers("mlflow", told, uri, "first", warn=said.append)
    second.log({"train/loss": 7.0}, 1501, 151.0)
    second.end("finished")
    printed = capfd.readouterr()
    assert (said, printed.out + printed.err) == ([], "")
    run = only_run(uri, "first")
    wanted = {"epochs": "3", "uri": "http://***@h", "text": "x" * 6000, "option_149": "149"}
    assert run.data.params.items() >= wanted.items()
    assert json.loads(run.data.tags["hvdtrain.changed_at_step_1400"]) == {"epochs": "4"}
    assert run.data.tags["hvdtrain.lost_at_step_1400"] == "rank 1 ended"
    expected = [*((step, step / 3) for step in range(1500)), (1501, 7.0)]
    assert history(uri, run, "train/loss") == expected
    ((step, value),) = history(uri, run, "test/top_5")
    assert step == 1500
    assert math.isnan(value)


def test_children(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is a child of the active one, or else of that in MLFLOW_RUN_ID."""
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # stands where none is given
    experiment_id = client(uri).create_experiment("family")
    named = client(uri).create_run(experiment_id, run_name="named").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", named)
    open_trackers("mlflow", facts(tmp_path / "child"), run_name="of named").end("failed")
    monkeypatch.delenv("MLFLOW_RUN_ID")
    with mlflow.start_run(experiment_id=experiment_id, run_name="active") as active:
        open_trackers("mlflow", facts(tmp_path / "other"), run_name="of active").end("finished")
        now = mlflow.active_run()
        assert now is not None
        assert now.info.run_id == active.info.run_id
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    open_trackers("mlflow", facts(tmp_path / "third")).end("finished")
    runs = {run.info.run_name: run for run in client(uri).search_runs([experiment_id])}
    assert set(runs) == {"named", "active", "of named", "of active"}
    parents = {name: run.data.tags.get("mlflow.parentRunId") for name, run in runs.items()}
    assert parents["of named"] == named
    assert parents["of active"] == active.info.run_id
    assert only_run(uri, "elsewhere").data.tags.get("mlflow.parentRunId") is None
    assert runs["of named"].info.status == "FAILED"


def test_files_and_a_store_that_is_gone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mlruns"
    with pytest.raises(UsageError, match="set `MLFLOW_ALLOW_FILE_STORE=true`"):
        open_trackers("mlflow", facts(tmp_path / "run"), str(folder))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    said: list[str] = []
    trackers = open_trackers("mlflow", facts(tmp_path / "run"), str(folder), "x", warn=said.append)
    trackers.log({"loss": 1.0}, 1, 1.0)
    # MLflow's own reader raises where the file is there and empty.
    wait_for(lambda: [path.stat().st_size > 0 for path in folder.rglob("metrics/loss")] == [True])
    run = only_run(str(folder), "x")
    folder.rename(tmp_path / "away")
    folder.write_text("a file")
    for step in (2, 3):
        trackers.log({"loss": float(step)}, step, float(step))
    log_until_told(trackers, 4, said)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    trackers.end("finished")
    assert len(said) == 1
    assert said[0].endswith("; training continues")
    steps = [step for step, _ in history(str(folder), run, "loss")]
    assert sorted(set(steps)) == [1, 2, 3, 4]  # tried again
    assert steps.count(2) == steps.count(3) == 1


def test_what_cannot_be_opened(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "file").touch()
    open_trackers("mlflow", facts(tmp_path / "run"), uri, "first").end("stopped")
    refusals = {
        "127.0.0.1:9 cannot be reached: .*refused": ("run2", "http://me:secret@127.0.0.1:9"),
        r"file/x/m.db cannot be reached: .*": ("run2", f"sqlite:///{tmp_path}/file/x/m.db"),
        r"nonsense://\*\*\*@x: .*": ("run2", "nonsense://me:secret@x"),
        r"IPv6": ("run2", "http://[me:secret@x"),
        r"run \w+ of \S+/run/mlflow.json was in sqlite\S+/mlflow.db, and is not in \S+/other: "
        "pass the earlier --tracking-uri": ("run", f"{tmp_path}/other"),
    }
    for text, (directory, wrong) in refusals.items():
        with pytest.raises(UsageError, match=text) as caught:
            open_trackers("mlflow", facts(tmp_path / directory), wrong)
        assert "secret" not in str(caught.value)
        assert "\n" not in str(caught.value)
    client(uri).delete_run(only_run(uri, "first").info.run_id)
    with pytest.raises(UsageError, match="was deleted in sqlite"):
        open_trackers("mlflow", facts(tmp_path / "run"), uri)
    (tmp_path / "run" / "mlflow.json").write_text("{")
    with pytest.raises(UsageError, match=r"mlflow.json is damaged: remove it"):
        open_trackers("mlflow", facts(tmp_path / "run"), uri)


def log_until_told(trackers: Trackers, step: int, said: list[str]) -> None:
    """Log until there is a warning: what goes wrong is told at the next call."""

    def told() -> bool:
        trackers.log({"loss": float(step)}, step, float(step))
        return bool(said)

    wait_for(told)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
