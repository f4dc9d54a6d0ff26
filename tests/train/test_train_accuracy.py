"""The main job as people start it, with torch and with Keras: files, accuracy, equal weights."""

import sys
from pathlib import Path

import pytest
from ranks import run_ranks, start
from run_files import SUMMARY_FIELDS, both_splits, epochs_of, metrics_of, summary_of
from tensorflow_environment import keras_variables, tensorflow_python

from hvdtrain.train.checkpoints import checkpoint_files, position_of


def check_files(directory: Path, size: int, epochs: int) -> None:
    summary = summary_of(directory)
    assert list(summary) == SUMMARY_FIELDS
    assert summary["world_size"] == len(summary["weights_sha256"]) == size
    assert summary["epochs"] == epochs
    assert summary["scaled_lr"] == pytest.approx(size * summary["base_lr"])
    assert summary["samples"] == epochs * 1437
    seconds = summary["seconds"]
    assert seconds["total"] == pytest.approx(seconds["compute"] + seconds["communicate"])
    assert 0 <= seconds["communicate"] < seconds["total"]
    assert epochs_of(directory) == both_splits(epochs)
    last = metrics_of(directory)[-1]
    assert last["loss"] == summary["final"]["loss"]
    assert last["lr"] == pytest.approx(summary["scaled_lr"])
    assert len(list(directory.glob("checkpoint-*.safetensors"))) == min(epochs, 3)
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("size", [1, 2])
def test_defaults_reach_97_percent(size: int, tmp_path: Path) -> None:
    done = run_ranks(["-m", "hvdtrain"], size, cwd=tmp_path)
    (directory,) = (tmp_path / "runs").iterdir()
    summary = summary_of(directory)
    assert summary["final"]["accuracy"] >= 0.97
    assert len(set(summary["weights_sha256"])) == 1
    check_files(directory, size, 15)
    for part in ("hvdtrain", f"{size} on 1 host", "samples/s", "communicating", "metrics.jsonl"):
        assert part in done.stdout
    assert sum(line.startswith("epoch ") for line in done.stdout.splitlines()) == 15
    assert done.stdout.count("test accuracy") == 1  # one rank speaks
    assert "\x1b" not in done.stdout  # plain lines where there is no terminal


def test_without_a_launcher_and_quietly(tmp_path: Path) -> None:
    arguments = ["--epochs", 1, "--quiet", "--out", tmp_path / "a", "--batch-size", 100]
    done = start([sys.executable, "-m", "hvdtrain", "train", "digits", *arguments]).end()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert summary_of(tmp_path / "a")["engine"] == "local"
    check_files(tmp_path / "a", 1, 1)


WORKER = Path(__file__).with_name("train_frameworks_worker.py")
EPOCHS = 7  # of which the warm-up has five


_SOAK = [pytest.param(backend, marks=pytest.mark.soak) for backend in ("torch", "jax")]


@pytest.mark.parametrize("backend", ["tensorflow", *_SOAK])
@pytest.mark.long
def test_two_ranks(backend: str, tmp_path: Path) -> None:
    shared = "0" if backend == "jax" else "1"  # to have seen both
    done = run_ranks(
        WORKER,
        2,
        args=[tmp_path, EPOCHS],
        python=tensorflow_python(),
        env=keras_variables(backend) | {"HVDTRAIN_SHARED_MEMORY": shared},
        timeout_seconds=600,
    )
    for rank, result in enumerate(done.results):
        assert result["dropout"]["goes on"]
        assert result.get("gpu", {}).get("index") == (None if backend == "torch" else rank)
        assert result["distance"] <= 1e-12
        steps = EPOCHS * -(-1437 // 32)
        calls = result["calls"]
        assert calls > steps if backend == "torch" else 2 <= calls <= 8, calls
    assert done.stdout.count(f"training digits with keras on {backend}\n") == 1
    check_runs(tmp_path)
    assert summary_of(tmp_path / "whole")["engine"] == ("gloo" if backend == "torch" else "mpi")
    assert done.stdout.count("test accuracy") == 1  # one rank speaks


def check_runs(directory: Path) -> None:
    whole, parts = summary_of(directory / "whole"), summary_of(directory / "parts")
    assert list(whole) == SUMMARY_FIELDS
    assert (whole["framework"], whole["world_size"], whole["epochs"]) == ("keras", 2, EPOCHS)
    assert whole["final"]["accuracy"] >= 0.97
    assert whole["samples"] == parts["samples"] == EPOCHS * 1437
    assert len(set(whole["weights_sha256"])) == 1
    assert parts["weights_sha256"] == whole["weights_sha256"]
    assert parts["final"] == whole["final"]
    for run in ("whole", "parts"):
        assert epochs_of(directory / run) == both_splits(EPOCHS)
        epochs = [position_of(path)[0] for path in checkpoint_files(directory / run)]
        assert sorted(set(epochs), reverse=True)[:2] == [EPOCHS, EPOCHS - 1]
        assert len(epochs) == 3
    # The warm-up ends with the fifth epoch, whose last step has the scaled rate.
    rates = [line["lr"] for line in metrics_of(directory / "whole") if line["split"] == "train"]
    want = [0.02 * (1 + min(epoch, 5) / 5) for epoch in range(1, EPOCHS + 1)]
    assert rates == pytest.approx(want, rel=1e-6)
