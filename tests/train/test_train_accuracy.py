"""The main job as people start it: files, terminal, accuracy, equal weights."""

import sys
from pathlib import Path

import pytest
from ranks import run_ranks, start
from run_files import SUMMARY_FIELDS, both_splits, epochs_of, metrics_of, summary_of


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
    seconds = summary["seconds"]["total"]
    print(f"{size} ranks: {summary['final']['accuracy']:.2%} in {seconds:.1f} s of training")
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
