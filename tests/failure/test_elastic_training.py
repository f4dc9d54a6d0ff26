"""Training goes on when ranks are killed: each sample once, and the weights of one rank."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ranks import launch, run_ranks, start
from run_files import metrics_of, summary_of
from segments import no_new_segments

RECIPE = Path(__file__).parent / "killed_recipe.py"
SAMPLES, BATCH, EPOCHS = 100, 12, 3
STEPS = 9  # of each epoch
OPTIONS = (
    f"--global-batch-size {BATCH} --epochs {EPOCHS} --lr 0.01 --lr-scaling none "
    "--device cpu --checkpoint-every 1epoch --log-every 4"
)
TOLERATE = ["--with-ft", "ulfm"]


def words(out: Path, *more: object) -> list[str]:
    asked = f"-m hvdtrain train {RECIPE} --out {out} {OPTIONS}".split()
    return [*asked, *map(str, more)]


def survive(folder: Path, ranks: int, kills: str, *more: object) -> dict[str, Any]:
    """Train while ranks kill themselves, check the files, and return the summary."""
    out, ledger = folder / "out", folder / "ledger"
    env = {"KILLS": kills, "HVDTRAIN_LEDGER": ledger}
    with (
        no_new_segments(),
        launch(words(out, *more), ranks, env=env, launcher_args=TOLERATE) as job,
    ):
        done = job.wait(120)
        if done.returncode != 0:
            job.fail(f"exit code {done.returncode}")
        job.assert_nothing_left()
    summary = summary_of(out)
    left = ranks - len(kills.split())
    assert summary["world_size"] == left
    assert len(set(summary["weights_sha256"])) == 1
    assert sum(len(failure["lost"]) for failure in summary["failures"]) == len(kills.split())
    assert done.stdout.count("training goes on with") == len(summary["failures"]), done.stdout
    require_each_once(ledger, ranks, summary["failures"])
    lines = [(line["split"], line["step"]) for line in metrics_of(out)]
    assert len(set(lines)) == len(lines)
    return summary


def require_each_once(ledger: Path, ranks: int, failures: list[Mapping[str, Any]]) -> None:
    """Check that the steps that count have used each sample once in each epoch."""
    last = {ranks: float("inf")}
    for failure in failures:
        last[ranks], ranks = failure["step"], failure["ranks"]
        last[ranks] = float("inf")
    used: dict[int, Counter[int]] = {}
    for path in ledger.parent.glob(f"{ledger.name}.*"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["epoch"] * STEPS + line["done"] // BATCH < last[line["ranks"]]:
                used.setdefault(line["epoch"], Counter()).update(line["samples"])
    assert sorted(used) == list(range(EPOCHS))
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), epoch


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the summary of one rank that nobody kills."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run_ranks(words(out), 1, cases_expected=False)
    summary: dict[str, Any] = summary_of(out)
    return summary


def require_like(summary: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    assert summary["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=1e-4)
    for name in ("steps", "samples", "global_batch_size", "scaled_lr"):
        assert summary[name] == alone[name], name


def test_a_rank_is_killed(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Rank 1 of 3 in the middle of the second epoch."""
    require_like(survive(tmp_path, 3, "1:13:forward"), alone)


KILLS = [
    "0:13:forward",
    "0:5:backward",
    "1:9:update",  # the last step of an epoch
    "0:18:update",
    "1:13:forward 2:13:forward",
    "0:4:forward 1:20:backward",
    "0:1:evaluation",
    "0:3:evaluation",
]


@pytest.mark.soak
@pytest.mark.parametrize("kills", KILLS)
def test_ranks_are_killed(kills: str, tmp_path: Path, alone: dict[str, Any]) -> None:
    """At other moments, two at once, and one after the other."""
    require_like(survive(tmp_path, 4, kills), alone)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_any_ranks_are_killed(seed: int, tmp_path: Path, alone: dict[str, Any]) -> None:
    """At moments that a seed draws, also while rank 0 writes a checkpoint."""
    draw = random.Random(seed)
    lost = draw.sample(range(4), draw.randint(1, 3))
    moments = ("forward", "backward", "update")
    kills = " ".join(f"{rank}:{draw.randint(1, 8)}:{draw.choice(moments)}" for rank in lost)
    require_like(survive(tmp_path, 4, kills, "--checkpoint-every", "1step"), alone)


@pytest.mark.soak
def test_batch_and_rate_are_rescaled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--epochs", "2", "--lr-scaling", "linear", "--elastic-batch", "rescale"]
    asked = [w for w in words(out, *more) if w not in ("--global-batch-size", str(BATCH))]
    with launch(
        [*asked, "--batch-size", "4"], 3, env={"KILLS": "1:4:forward"}, launcher_args=TOLERATE
    ) as job:
        assert job.wait(120).returncode == 0
    summary = summary_of(out)
    assert (summary["global_batch_size"], summary["samples"]) == (8, 2 * SAMPLES)
    assert summary["scaled_lr"] == pytest.approx(0.02)


@pytest.mark.soak
def test_too_few_are_left(tmp_path: Path) -> None:
    """The ranks that are left save, and a job with enough of them goes on."""
    out = tmp_path / "out"
    run = ["-m", "hvdtrain", "run", "--elastic", "--min-np", "2", "-np", "2", "--"]
    with start([sys.executable, *run, *words(out)[2:]], env={"KILLS": "0:13:forward"}) as job:
        done = job.wait(120)
    assert done.returncode == 75, done.stderr
    assert "1 rank left, fewer than --min-np 2: 1 epoch and 36 samples are saved" in done.stderr
    assert (out / "requeue").exists()
    run_ranks(words(out, "--resume", "auto"), 2, cases_expected=False)
    assert summary_of(out)["samples"] == EPOCHS * SAMPLES
