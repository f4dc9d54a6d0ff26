"""A run that is killed at any moment, and started again, ends as if it had not been."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from ranks import launch, run_ranks
from run_files import both_splits, epochs_of, metrics_of, summary_of

from hvdtrain.train.checkpoint.directory import checkpoint_files
from hvdtrain.train.checkpoint.names import BEST, CHECKPOINT, CheckpointName, position_of

RECIPE = """
import numpy as np
from torch import nn
from hvdtrain.data.dataset import Samples
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipes.recipe import Recipe

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
PATIENCE_SECONDS = 60.0
# The files that a start writes are smaller, and each checkpoint is larger.
LEAST_BYTES = 100_000


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
        process: the one that trains.
    """

    def __init__(self, server: subprocess.Popen[str], recipe: Path, out: Path, epochs: int) -> None:
        self._server, self._arguments = server, arguments(recipe, out, epochs)
        self.out = out
        self._output = out.with_suffix(".txt")
        self._origin = ""

    def start(self) -> None:
        newest = next(iter(checkpoint_files(self.out)), None)
        self._origin = f"{newest}, " if newest else f"no checkpoint in {self.out}: "
        self._output.write_text("")
        assert self._server.stdin is not None
        request = json.dumps([self._arguments, str(self._output)])
        print(request, file=self._server.stdin, flush=True)
        self.process = int(self._line())

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, self.said

    def stop(self) -> None:
        """Have it do nothing until it goes on."""
        os.kill(self.process, signal.SIGSTOP)
        threads = Path(f"/proc/{self.process}/task")
        wait_until(lambda: all(_state(thread) in "TZ" for thread in threads.iterdir()))

    def go_on(self) -> None:
        os.kill(self.process, signal.SIGCONT)

    def wait(self) -> int:
        """Return how it ended; fail if it has not gone on from the newest checkpoint."""
        code = int(self._line())
        if "results" in self.said:
            assert self._origin in self.said, (self._origin, self.said)
        assert "damaged" not in self.said
        return code

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    @property
    def said(self) -> str:
        return self._output.read_text()


def _state(thread: Path) -> str:
    with suppress(OSError):  # it has ended
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


@contextmanager
def server() -> Iterator[subprocess.Popen[str]]:
    """Start what starts processes that need no time for imports."""
    worker = Path(__file__).with_name("forking_worker.py")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, worker], text=True, stdin=pipe, stdout=pipe) as process:
        yield process


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return the first value that is true, asking as often as can be."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
    return found


def wait_for_checkpoints(out: Path, count: int) -> None:
    """Wait until so many more are there."""
    known = named(out, CHECKPOINT)
    seen: set[Path] = set()

    def enough() -> bool:
        seen.update(named(out, CHECKPOINT) - known)
        return len(seen) >= count

    wait_until(enough)


def named(out: Path, kind: str) -> set[Path]:
    """Return the checkpoints of this kind."""
    names = {path: CheckpointName.of(path) for path in out.glob(f"{kind}-*")}
    return {path for path, name in names.items() if name is not None}


def half_checkpoints(out: Path, least_bytes: int = LEAST_BYTES) -> list[Path]:
    """Return the temporary files of at least this size."""
    found = []
    for path in out.glob(".unfinished-*"):
        with suppress(FileNotFoundError):  # it has got its name
            if path.stat().st_size >= least_bytes:
                found.append(path)
    return found


def kill_at_any_time(trainer: Trainer, rng: random.Random, pace: float) -> None:
    """Kill it while it starts, or until two saves later."""
    wait_for_checkpoints(trainer.out, rng.randrange(2))
    time.sleep(rng.uniform(0, pace))
    trainer.kill()


def kill_in_a_save(trainer: Trainer, rng: random.Random, pace: float) -> None:
    """Kill it while it writes, in the first save that it has not finished when it is seen."""
    wait_for_checkpoints(trainer.out, rng.randrange(2))
    while True:
        files = wait_until(lambda: half_checkpoints(trainer.out))
        trainer.stop()
        if any(path.exists() for path in files):
            break
        trainer.go_on()
    trainer.kill()


def kill_after_a_save(trainer: Trainer, rng: random.Random, pace: float) -> None:
    """Kill it when an epoch is saved: before the best is marked, or others are removed."""
    known = named(trainer.out, CHECKPOINT)
    wait_until(lambda: any(not position_of(p)[1] for p in named(trainer.out, CHECKPOINT) - known))
    trainer.kill()


def kill_after_marking(trainer: Trainer, rng: random.Random, pace: float) -> None:
    """Kill it when the best has its name: before that of the one before is removed."""
    known = named(trainer.out, BEST)
    wait_until(lambda: named(trainer.out, BEST) - known)
    trainer.kill()


def kill_at_the_start(trainer: Trainer, rng: random.Random, pace: float) -> None:
    """Kill it while it prepares the directory and takes lines back."""
    wait_until(lambda: half_checkpoints(trainer.out, 0))
    time.sleep(rng.uniform(0, 0.005))
    trainer.kill()


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
        reference.start()
        assert reference.wait() == 0, reference.said
        pace = summary_of(whole)["seconds"]["total"] / (epochs * STEPS / SAVE_STEPS)
        trainer = Trainer(process, recipe, parts, epochs)
        for kill in chain(*plan):
            trainer.start()
            kill(trainer, rng, pace)
            if kill is kill_in_a_save:
                assert_best(parts, losses_of(whole, "test"))
        assert position_of(checkpoint_files(parts)[0]) < (epochs, 0)
        trainer.start()
        assert trainer.wait() == 0, trainer.said
    assert_same(parts, whole, epochs)


def test_ranks_of_which_one_is_killed_in_a_save_end_as_those_that_are_not(
    recipe: Path, tmp_path: Path
) -> None:
    whole, parts, epochs = tmp_path / "whole", tmp_path / "parts", 2
    module = ["-m", "hvdtrain"]
    run_ranks(module, 2, args=arguments(recipe, whole, epochs))
    with launch(module, 2, args=arguments(recipe, parts, epochs)) as job:
        process = job.rank_pids(2)[0]
        wait_for_checkpoints(parts, 3)
        wait_until(lambda: half_checkpoints(parts))
        os.kill(process, signal.SIGKILL)
        assert job.wait(60).returncode != 0
        job.assert_nothing_left()
    newest = checkpoint_files(parts)[0]
    done = run_ranks(module, 2, args=arguments(recipe, parts, epochs))
    assert f"{newest}, " in done.stdout
    assert_same(parts, whole, epochs)
