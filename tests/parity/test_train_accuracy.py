"""The main job as people start it: files, terminal, accuracy, equal weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks, start

LIMIT_SECONDS = 120
FIELDS = {
    "world_size",
    "hosts",
    "host_names",
    "engine",
    "framework",
    "global_batch_size",
    "base_lr",
    "scaled_lr",
    "epochs",
    "final",
    "samples",
    "samples_per_second",
    "seconds",
    "weights_sha256",
}


def summary_of(directory: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def check_files(directory: Path, size: int, epochs: int) -> None:
    """Check that a run's files are complete and agree with each other."""
    summary = summary_of(directory)
    assert set(summary) == FIELDS
    assert summary["world_size"] == len(summary["weights_sha256"]) == size
    assert summary["epochs"] == epochs
    assert summary["scaled_lr"] == pytest.approx(size * summary["base_lr"])
    assert summary["samples"] == epochs * 1437
    seconds = summary["seconds"]
    assert seconds["total"] == pytest.approx(seconds["compute"] + seconds["communicate"])
    assert 0 <= seconds["communicate"] < seconds["total"]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["split"]) for line in lines] == [
        (epoch, split) for epoch in range(1, epochs + 1) for split in ("train", "test")
    ]
    assert lines[-1]["loss"] == summary["final"]["loss"]
    assert lines[-1]["lr"] == pytest.approx(summary["scaled_lr"])
    assert len(list(directory.glob("checkpoint-*.pt"))) == epochs
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_defaults_reach_97_percent(size: int, tmp_path: Path) -> None:
    done = run_ranks(["-m", "hvdtrain"], size, cwd=tmp_path, timeout_seconds=LIMIT_SECONDS)
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
    with start([sys.executable, "-m", "hvdtrain", "train", "digits", *arguments]) as job:
        done = job.wait(LIMIT_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert summary_of(tmp_path / "a")["engine"] == "local"
    check_files(tmp_path / "a", 1, 1)
