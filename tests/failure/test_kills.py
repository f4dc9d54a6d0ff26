"""A run that is killed at any moment, and started again, ends as if it had not been."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
from job import python_path
from ranks import launch, run_ranks
from run_files import both_splits, epochs_of, metrics_of, summary_of
from save_kills import LEAST_BYTES

from hvdtrain.train.checkpoint.file import BEST, CHECKPOINT, CheckpointName, position_of
from hvdtrain.train.checkpoint.saver import checkpoint_files

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


class Trainer:
    """Processes that train, one after the other, in one directory.

    Attributes:
        out: the directory.
    """

    def __init__(self, server: subprocess.Popen[str], recipe: Path, out: Path, epochs: int) -> None:
        self._server, self._arguments = server, arguments(recipe, out, epochs)
        self.out = out
        self._output = out.with_suffix(".txt")

    def run(self, kill: str = "") -> int:
        """Return how a process ended; fail if it has not gone on from the newest checkpoint.

        Args:
            kill: when it is to kill itself; see save_kills.py.
        """
        newest = next(iter(checkpoint_files(self.out)), None)
        origin = f"{newest}, " if newest else f"no checkpoint in {self.out}: "
        self._output.write_text("")
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        request = json.dumps([self._arguments, str(self._output), kill])
        print(request, file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        if "results" in self.said:
            assert origin in self.said, (origin, self.said)
        assert "damaged" not in self.said
        return code

    @property
    def said(self) -> str:
        return self._output.read_text()


@contextmanager
def server() -> Iterator[subprocess.Popen[str]]:
    """Start what starts processes that need no time for imports."""
    worker = Path(__file__).with_name("forking_worker.py")
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": python_path()}
    with subprocess.Popen(
        [sys.executable, worker], text=True, stdin=pipe, stdout=pipe, env=env
    ) as process:
        yield process


def named(out: Path, kind: str) -> set[Path]:
    """Return the checkpoints of this kind."""
    names = {path: CheckpointName.of(path) for path in out.glob(f"{kind}-*")}
    return {path for path, name in names.items() if name is not None}


def half_checkpoints(out: Path, least_bytes: int = LEAST_BYTES) -> list[Path]:
    """Return the temporary files of at least this size."""
    return [path for path in out.glob(".unfinished-*") if path.stat().st_size >= least_bytes]


def kill_at_any_time(rng: random.Random, pace: float) -> str:
    """Kill it while it starts, or until two saves later."""
    return f"any:{rng.randrange(2)}:{rng.uniform(0, pace)}"


def kill_in_a_save(rng: random.Random, pace: float) -> str:
    """Kill it while it writes, in its first save or the second."""
    return f"save:{rng.randint(1, 2)}:0"


def kill_after_a_save(rng: random.Random, pace: float) -> str:
    """Kill it when an epoch is saved: before the best is marked, or others are removed."""
    return f"{rng.choice(['saved', 'removes'])}:0:0"


def kill_after_marking(rng: random.Random, pace: float) -> str:
    """Kill it when the best has its name: before that of the one before is removed."""
    return "marked:0:0"


def kill_at_the_start(rng: random.Random, pace: float) -> str:
    """Kill it while it prepares the directory and takes lines back."""
    return f"start:0:{rng.uniform(0, 0.005)}"


def assert_best(out: Path, losses: list[float]) -> None:
    """See that the one best is that of all epochs that are done.

    So it must be while a checkpoint is written, whatever had happened before that start.
    """
    epochs = position_of(checkpoint_files(out)[0])[0]
    expected = [losses.index(min(losses[:epochs])) + 1] if epochs else []
    assert [position_of(path) for path in named(out, BEST)] == [(epoch, 0) for epoch in expected]


def losses_of(out: Path, split: str) -> list[float]:
    return [line["loss"] for line in metrics_of(out) if line["split"] == split]


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


# Only where a start comes as far as a save can it be seen that it has put things right.
SAVED = [kill_after_a_save, kill_in_a_save]
MARKED = [kill_after_marking, kill_in_a_save]
TWENTY_KILLS = [SAVED] * 3 + [MARKED] * 2 + [[kill_in_a_save]]
TWENTY_KILLS += [[kill_at_any_time]] * 7 + [[kill_at_the_start]] * 3


@pytest.mark.soak
def test_a_run_that_is_killed_twenty_times_ends_as_one_that_is_not(
    recipe: Path, tmp_path: Path
) -> None:
    whole, parts, epochs = tmp_path / "whole", tmp_path / "parts", 14
    rng = random.Random(11)
    plan = rng.sample(TWENTY_KILLS, len(TWENTY_KILLS))
    with server() as process:
        reference = Trainer(process, recipe, whole, epochs)
        assert reference.run() == 0, reference.said
        pace = summary_of(whole)["seconds"]["total"] / (epochs * STEPS / SAVE_STEPS)
        trainer = Trainer(process, recipe, parts, epochs)
        for kill in chain(*plan):
            assert trainer.run(kill(rng, pace)) == -signal.SIGKILL, trainer.said
            if kill is kill_in_a_save:
                assert half_checkpoints(parts)
                assert_best(parts, losses_of(whole, "test"))
        assert position_of(checkpoint_files(parts)[0]) < (epochs, 0)
        assert trainer.run() == 0, trainer.said
    assert_same(parts, whole, epochs)


def test_ranks_of_which_one_is_killed_in_a_save_end_as_those_that_are_not(
    recipe: Path, tmp_path: Path
) -> None:
    whole, parts, epochs = tmp_path / "whole", tmp_path / "parts", 2
    module = ["-m", "hvdtrain"]
    run_ranks(module, 2, args=arguments(recipe, whole, epochs))
    env = {"KILL": "save:4:0"}  # on rank 0, which saves
    with launch(module, 2, args=arguments(recipe, parts, epochs), env=env) as job:
        assert job.ended().returncode != 0
    assert half_checkpoints(parts)
    newest = checkpoint_files(parts)[0]
    done = run_ranks(module, 2, args=arguments(recipe, parts, epochs))
    assert f"{newest}, " in done.stdout
    assert_same(parts, whole, epochs)
