"""Sweeps: all ranks train each trial with the numbers that the study holds, to the last bit."""

import json
import os
import re
import shlex
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from outcomes import outcomes
from paths import TESTS
from ranks import start
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


def _at_once(ranks: int, *words: object) -> list[object]:
    own = ["--ranks-per-trial", 2, "--no-prune", "--search", "set.x=-5..10."]
    return [sys.executable, "-m", "hvdtrain", "run", "-np", ranks, *words, *own]


def test_trials_at_once_are_those_of_one_job(tmp_path: Path) -> None:
    search = ["--search", "set.how=well,raises", "--search", "lr=0.001..0.1:log"]
    words = _at_once(5, *_sweep("both", 6, *search))
    done = start(words, cwd=tmp_path).end(code=0)
    assert done.stdout.startswith("trials at once: 2, ranks of each: 2, idle ranks: 1\n")
    (alone,) = outcomes([[*_sweep("alone", 6, *search), *words[-3:]]], tmp_path, 2)
    ends = [said.partition("the best by loss:")[2] for said in (done.stdout, alone.stdout)]
    assert ends[0] == ends[1].replace("alone", "both")
    both, one_by_one = _trials(tmp_path / "both"), _trials(tmp_path / "alone")
    assert {trial["state"] for trial in both} == {"complete", "fail"}
    for trial, other in zip(both, one_by_one, strict=True):
        del trial["seconds"], other["seconds"]
        assert trial == other
        if trial["state"] == "complete":
            folders = (tmp_path / name / trial["directory"] for name in ("both", "alone"))
            first, second = map(summary_of, folders)
            assert first["weights_sha256"] == second["weights_sha256"]
            assert (first["world_size"], first["final"]["loss"]) == (2, trial["value"])


def test_others_go_on_without_lost_ranks_and_ctrl_c_stops_all(tmp_path: Path) -> None:
    killed = _at_once(4, *_sweep("killed", 4, "--set", "how=killed"))
    done = start(killed, cwd=tmp_path).end(code=0)
    assert "the best by loss:" in done.stdout
    trials = _trials(tmp_path / "killed")
    assert sorted(trial["state"] for trial in trials) == ["complete"] * 3 + ["fail"]
    assert [t["problem"] for t in trials if t["state"] == "fail"] == ["its ranks were lost"]
    with start(_at_once(4, *_sweep("halted", 10000)), cwd=tmp_path) as job:
        job.wait_for_output("trial 0 ")
        job.wait_for_output("trial 1 ")
        # interrupt() sends it to all, but unlike a terminal as a process: it would come twice.
        os.kill(job.process.pid, signal.SIGINT)
        done = job.ended(code=128 + signal.SIGINT)
    assert "the best by loss:" in done.stdout
    halted = _trials(tmp_path / "halted")
    assert {trial["state"] for trial in halted} <= {"complete", "fail"}
    assert {t["problem"] for t in halted if t["state"] == "fail"} <= {"interrupted"}


def test_hosts_are_divided_among_trials(tmp_path: Path) -> None:
    refused = {
        "run -np 1": "--ranks-per-trial 2 is more than the 1 ranks",
        "run -np 4 --elastic": "needs mpirun, -np N on this host or hosts with their slots",
        "run -np 4 --bind core": "and neither --per-node, --elastic nor --bind",
        "run -hostfile users": "hosts with their slots and nothing else",
        "": "start the ranks with `python -m hvdtrain run -np RANKS sweep ...`",
        "run -np 4 -- sweep --trials 0": "--trials",
    }
    hosts = ["run", "--dry-run", "-H", "a:5,b:2,c:1,d:3"]
    words = ["sweep", *_at_once(0)[6:]]
    commands = [[*hosts, *words], *([*before.split(), *words] for before in refused)]
    (tmp_path / "users").write_text("me@a slots=4\n")
    divided, *others = outcomes(commands, tmp_path)
    lines = divided.stdout.splitlines()
    expected = [("a:2", "0,1"), ("a:2", "2,3"), ("b:2", None), ("d:2", "0,1")]
    assert len(lines) == len(expected)
    for line, (host, gpus) in zip(lines, expected, strict=True):
        assert f" -host {host} -x " in line
        assert " -np 2 " in line
        assert gpus is None or f"CUDA_VISIBLE_DEVICES={gpus} " in line
    for one, problem in zip(others, refused.values(), strict=True):
        assert (one.returncode, one.stdout) == (2, "")
        assert problem in one.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["users"]


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
