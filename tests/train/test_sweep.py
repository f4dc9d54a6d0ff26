"""Sweeps: all ranks train each trial with the numbers that the study holds, to the last bit."""

import json
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest
from outcomes import outcomes
from paths import TESTS
from run_files import summary_of

optuna = pytest.importorskip("optuna")

RECIPES = TESTS / "train" / "sweep_recipes.py"
SEARCH = ["--search", "set.x=-5..10.", "--search", "set.kind=low,high"]
SEARCH += ["--search", "learning-rate=0.001..0.1:log", "--search", "batch_size=2..5"]
FAILURES = {
    "refused": "there is no such model",
    "raises": "this layer does not fit",
    "infinite": "step 1: the loss is nan on rank",
}


def _sweep(out: str, trials: int, *others: object) -> list[object]:
    words: list[object] = ["sweep", RECIPES, "--out", out, "--trials", trials, "--epochs", 2]
    return [*words, *others]


def _trials(folder: Path) -> list[dict[str, Any]]:
    """Return what sweep.json says of the trials, by number."""
    found = json.loads((folder / "sweep.json").read_text())["trials"]
    return sorted(found, key=lambda trial: trial["number"])


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (1, 3, 4))]
)
def test_trials_are_exact_pruned_recorded_and_resumed(tmp_path: Path, size: int) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    tracked = ["--track", "mlflow", "--tracking-uri", store, "--experiment", "sweeps"]
    stopped = _sweep("halted", 2, *SEARCH, "--set", "how=stopped")
    done = outcomes(
        [
            _sweep("whole", 12, *SEARCH),
            _sweep("parts", 2, *SEARCH, *tracked),
            _sweep("parts", 4, *SEARCH, *tracked),
            stopped,
            stopped,
            _sweep("high", 2, *SEARCH, "--best", "height"),
            *(_sweep(how, 1, "--search", f"set.how={how}") for how in FAILURES),
            _sweep("mixed", 4, "--search", "set.how=well,raises"),
        ],
        tmp_path,
        size,
        env={"MLFLOW_DISABLE_TELEMETRY": "true"},
    )
    codes = [0] * 6 + [1] * len(FAILURES) + [0]
    assert [one.returncode for one in done] == codes, done
    for one, problem in zip(done[6:9], FAILURES.values(), strict=True):
        assert re.match(rf"hvdtrain: no trial has ended well: .*{problem}", one.stderr), one.stderr
    whole, before = _trials(tmp_path / "whole"), list[float]()
    for trial in whole:
        value, chosen = trial["value"], trial["values"]
        assert value == pytest.approx((chosen["set.x"] - 3) ** 2 + (chosen["set.kind"] == "high"))
        prunes = len(before) >= 5 and value > statistics.median(before)
        assert trial["state"] == ("pruned" if prunes else "complete")
        run = tmp_path / "whole" / f"trial-{trial['number']}"
        assert summary_of(run)["epochs"] == (1 if prunes else 2)
        before += [] if prunes else [value]
        config = (run / "config.yaml").read_text()
        for name in ("set.x", "lr", "batch_size"):
            key = name.removeprefix("set.").replace("_", "-")
            assert re.search(rf"^ *{key}: {chosen[name]!r}( |$)", config, re.M), (key, config)
    assert {trial["state"] for trial in whole} == {"pruned", "complete"}
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "whole" / "study.journal"))
    )
    study = optuna.load_study(study_name="whole", storage=storage)
    assert [trial.params for trial in study.trials] == [trial["values"] for trial in whole]
    best = json.loads((tmp_path / "whole" / "sweep.json").read_text())
    assert best["best"]["value"] == study.best_value == min(before)
    assert best["command"] in done[0].stdout
    again = [*shlex.split(best["command"])[3:], "--out", "again"]
    (once,) = outcomes([again], tmp_path, size)
    assert once.returncode == 0
    assert summary_of(tmp_path / "again")["final"]["loss"] == min(before)
    first = [trial["values"] for trial in whole]
    assert [trial["values"] for trial in _trials(tmp_path / "parts")] == first[:4]
    interrupted, *went_on = _trials(tmp_path / "halted")
    assert (interrupted["state"], interrupted["problem"]) == ("fail", "interrupted")
    assert [trial["values"] for trial in (interrupted, *went_on)] == [first[0], *first[:2]]
    highest = json.loads((tmp_path / "high" / "sweep.json").read_text())["best"]["value"]
    assert highest == pytest.approx(-min(whole[0]["value"], whole[1]["value"]))
    assert {trial["state"] for trial in _trials(tmp_path / "mixed")} == {"complete", "fail"}
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("sweeps").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert set(runs) == {"parts", *(f"trial-{number}" for number in range(4))}
    parent = runs.pop("parts")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert {run.info.status for run in (parent, *runs.values())} == {"FINISHED"}
    values = client.get_metric_history(parent.info.run_id, "trial/loss")
    assert [one.value for one in values] == [trial["value"] for trial in whole[:4]]


def test_what_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    refused = {
        "--search lr": "--search 'lr': write NAME=",
        "--search lr=0.1..": "--search 'lr=0.1..': write NAME=",
        "--search lr=0.1..0.01": "a range is one of numbers, the least one first",
        "--search lr=0..1:log": "--search lr must be a positive number",
        "--search set.x=0..1:log": "with :log, numbers must be positive",
        "--search epochs=a,b": "epochs is a whole number",
        "--search out=a,b": "--search out: what can differ between trials is set.ARGUMENT",
        "--search lr=1,2 --search learning-rate=1,2": "once for each name",
        "": "a sweep needs --search",
        "--search lr=1,2 --dry-run 2": "--dry-run 2 does not go with a sweep",
    }
    done = outcomes([["sweep", RECIPES, *words.split()] for words in refused], tmp_path)
    for one, problem in zip(done, refused.values(), strict=True):
        assert (one.returncode, one.stdout) == (2, "")
        assert problem in one.stderr
    assert not list(tmp_path.iterdir())
