"""A run that is killed at any moment, and started again, ends as if it had not been."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from ranks import launch, run_ranks
from run_files import both_splits, epochs_of, metrics_of, summary_of
from save_kills import LEAST_BYTES

from hvdtrain.train.checkpoint.directory import checkpoint_files
from hvdtrain.train.checkpoint.file import BEST, CHECKPOINT, CheckpointName, position_of

RECIPE = """
import numpy as np
import save_kills
from torch import nn
from hvdtrain.data.dataset import Samples
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipes.recipe import Recipe

save_kills.arrange()

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


def named(out: Path, kind: str) -> set[Path]:
    """Return the checkpoints of this kind."""
    names = {path: CheckpointName.of(path) for path in out.glob(f"{kind}-*")}
    return {path for path, name in names.items() if name is not None}


def half_checkpoints(out: Path, least_bytes: int = LEAST_BYTES) -> list[Path]:
    """Return the temporary files of at least this size."""
    return [path for path in out.glob(".unfinished-*") if path.stat().st_size >= least_bytes]


def steps_of(out: Path, name: str) -> list[int]:
    return [json.loads(line)["step"] for line in (out / name).read_text().splitlines()]


def rows_of(out: Path) -> list[tuple[str, ...]]:
    """Return step and losses of metrics.csv, but for rows that are written by the clock."""
    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["step"], row["train/loss"], row["test/loss"]) for row in rows if row["epoch"]]


def assert_same(parts: Path, whole: Path, epochs: int) -> None:
    """See that a run that was killed has left what one that was not has left."""
    assert summary_of(parts)["weights_sha256"] == summary_of(whole)["weights_sha256"]
    assert epochs_of(parts) == epochs_of(whole) == both_splits(epochs)
    for ours, theirs in zip(metrics_of(parts), metrics_of(whole), strict=True):
        assert (ours["loss"], ours["accuracy"]) == (theirs["loss"], theirs["accuracy"])
    assert steps_of(parts, "steps.jsonl") == list(range(5, epochs * STEPS + 1, 5))
    assert rows_of(parts) == rows_of(whole)
    for kind in (CHECKPOINT, BEST):
        places = [sorted(map(position_of, named(out, kind))) for out in (parts, whole)]
        assert places[0] == places[1]
    assert not half_checkpoints(parts, 0)


def test_ranks_of_which_one_is_killed_in_a_save_end_as_those_that_are_not(
    recipe: Path, tmp_path: Path
) -> None:
    whole, parts, epochs = tmp_path / "whole", tmp_path / "parts", 2
    module = ["-m", "hvdtrain"]
    run_ranks(module, 2, args=arguments(recipe, whole, epochs))
    env = {"KILL": "save:4:0"}  # on rank 0, which saves
    with launch(module, 2, args=arguments(recipe, parts, epochs), env=env) as job:
        assert job.wait(300).returncode != 0
        job.assert_nothing_left()
    assert half_checkpoints(parts)
    newest = checkpoint_files(parts)[0]
    done = run_ranks(module, 2, args=arguments(recipe, parts, epochs))
    assert f"{newest}, " in done.stdout
    assert_same(parts, whole, epochs)
