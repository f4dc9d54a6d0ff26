"""A run that is killed at any moment, and started again, ends as if it had not been."""

import csv
import json
import random
import signal
from pathlib import Path

import pytest
from job import Completed
from paths import TRAINING
from ranks import launch
from run_files import both_splits, epochs_of, metrics_of, summary_of
from save_kills import LEAST_BYTES

from hvdtrain.train.checkpoints import (
    BEST,
    CHECKPOINT,
    CheckpointName,
    checkpoint_files,
    position_of,
)

RECIPE = """
import numpy as np
from torch import nn
from hvdtrain.data.dataset import Samples
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe

def samples(rng, count):
    inputs = rng.standard_normal((count, 32), dtype=np.float32)
    return Samples(inputs, (inputs[:, :5].sum(1) > 0).astype(np.int64))

def recipe():
    rng = np.random.default_rng(7)
    model = nn.Sequential(
        nn.Linear(32, 500), nn.ReLU(), nn.Dropout(0.2), nn.Linear(500, 500), nn.ReLU(),
        nn.Linear(500, 2),
    )
    return Recipe(
        model=model, train=samples(rng, 410), test=samples(rng, 100),
        loss=nn.CrossEntropyLoss(), metrics={"accuracy": Accuracy()}, most_threads=1,
    )
"""
STEPS = 21  # of each epoch
OPTIONS = (
    "--global-batch-size 20 --optimizer adam --lr 0.0002 --ema 0.9 --seed 3 --device cpu "
    "--log-every 5 --watch-every 7 --resume auto"
)
SAVE_STEPS, KEEP = 4, 2


def arguments(recipe: Path, out: Path, epochs: int) -> list[str]:
    asked = f"train {recipe} --out {out} --epochs {epochs} {OPTIONS}".split()
    often = ["--checkpoint-every", f"{SAVE_STEPS} steps", "--keep-checkpoints", str(KEEP)]
    return [*asked, *often]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def train(recipe: Path, out: Path, epochs: int, ranks: int = 1, kill: str = "") -> Completed:
    newest = next(iter(checkpoint_files(out)), None)
    origin = f"{newest}, " if newest else f"no checkpoint in {out}: "
    words, worker = arguments(recipe, out, epochs), TRAINING / "save_kills.py"
    done = launch(worker, ranks, args=words, env={"KILL": kill}, warm="torch").end()
    assert origin in done.stdout or "results" not in done.stdout, (origin, done.stdout)
    assert "damaged" not in done.stdout + done.stderr
    assert done.returncode == (128 + signal.SIGKILL if kill else 0), done.stderr
    return done


def named(out: Path, kind: str) -> set[Path]:
    names = {path: CheckpointName.of(path) for path in out.glob(f"{kind}-*")}
    return {path for path, name in names.items() if name is not None}


def half_checkpoints(out: Path, least_bytes: int = LEAST_BYTES) -> list[Path]:
    return [path for path in out.glob(".unfinished-*") if path.stat().st_size >= least_bytes]


def assert_best(out: Path, whole: Path) -> None:
    """See that the one best is that of all epochs that are done, whatever had happened before."""
    losses = [line["loss"] for line in metrics_of(whole) if line["split"] == "test"]
    epochs = position_of(checkpoint_files(out)[0])[0]
    expected = [losses.index(min(losses[:epochs])) + 1] if epochs else []
    assert [position_of(path) for path in named(out, BEST)] == [(epoch, 0) for epoch in expected]


def rows_of(out: Path) -> list[tuple[str, ...]]:
    """Return step and losses of metrics.csv, but for rows that are written by the clock."""
    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["step"], row["train/loss"], row["test/loss"]) for row in rows if row["epoch"]]


def assert_same(parts: Path, whole: Path, epochs: int) -> None:
    assert summary_of(parts)["weights_sha256"] == summary_of(whole)["weights_sha256"]
    assert epochs_of(parts) == epochs_of(whole) == both_splits(epochs)
    for ours, theirs in zip(metrics_of(parts), metrics_of(whole), strict=True):
        assert (ours["loss"], ours["accuracy"]) == (theirs["loss"], theirs["accuracy"])
    lines = map(json.loads, (parts / "steps.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == list(range(5, epochs * STEPS + 1, 5))
    assert rows_of(parts) == rows_of(whole)
    for kind in (CHECKPOINT, BEST):
        places = [sorted(map(position_of, named(out, kind))) for out in (parts, whole)]
        assert places[0] == places[1]
    assert not half_checkpoints(parts, 0)


@pytest.mark.soak
def test_a_run_that_is_killed_twenty_times_ends_as_one_that_is_not(
    recipe: Path, tmp_path: Path
) -> None:
    """Before it does something to a file, and then within a checkpoint.

    Only where a start comes as far as a save can it be seen that it has put things right.
    """
    whole, parts, epochs = tmp_path / "whole", tmp_path / "parts", 14
    rng = random.Random(11)
    train(recipe, whole, epochs)
    for _ in range(10):
        train(recipe, parts, epochs, kill=f"file:{rng.randint(1, 50)}:{parts}")
        train(recipe, parts, epochs, kill=f"half:{rng.randint(1, 2)}")
        assert half_checkpoints(parts)
        assert_best(parts, whole)
    assert position_of(checkpoint_files(parts)[0]) < (epochs, 0)
    train(recipe, parts, epochs)
    assert_same(parts, whole, epochs)


def test_ranks_of_which_one_is_killed_in_a_save_end_as_those_that_are_not(
    recipe: Path, tmp_path: Path
) -> None:
    whole, parts, epochs = tmp_path / "whole", tmp_path / "parts", 2
    train(recipe, whole, epochs, 2)
    train(recipe, parts, epochs, 2, kill="half:4")  # on rank 0, which saves
    assert half_checkpoints(parts)
    train(recipe, parts, epochs, 2)
    assert_same(parts, whole, epochs)
