"""Training goes on when ranks are killed or leave: each sample once, and one rank's weights."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from killed_runs import BATCH, EPOCHS, SAMPLES, TOLERATE, ledger_lines, losses, survive, words
from ranks import launch, run_ranks, start
from run_files import summary_of


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the summary of one rank that nobody kills, and its training losses."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run_ranks(words(out), 1, cases_expected=False)
    return {**summary_of(out), "losses": losses(out)}


def require_like(summary: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    assert summary["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=1e-4)
    for name in ("steps", "samples", "global_batch_size", "scaled_lr"):
        assert summary[name] == alone[name], name


def test_a_rank_leaves_and_another_is_killed(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Rank 2 of 4 after the first step, and rank 1 in the middle of the second epoch."""
    timeline = tmp_path / "timeline.json"
    variables = {"HVDTRAIN_TIMELINE": timeline}
    started = time.monotonic()
    summary = survive(tmp_path, 4, "2:1:forward:leave 1:13:forward", variables=variables)
    seconds = time.monotonic() - started
    require_like(summary, alone)
    left, killed = summary["failures"]
    assert (left["step"], left["lost"], left["ranks"], left["left"]) == (1, [2], 3, True)
    # The recipe is made, and counts, anew after each recovery: 13 steps after the first.
    assert (killed["step"], killed["lost"], killed["ranks"], killed["left"]) == (13, [1], 2, False)
    # No step is taken twice for a rank that leaves, and no part of the loss is missing.
    before = [line["done"] for line in ledger_lines(tmp_path / "ledger") if line["ranks"] == 4]
    assert before == [0] * 4
    assert losses(tmp_path / "out")[0] == pytest.approx(alone["losses"][0], rel=1e-4)
    events = json.loads(timeline.read_text())["traceEvents"]
    marks = [event for event in events if event["name"].endswith(" lost")]
    assert [(mark["pid"], mark["name"], mark["args"]["lost"]) for mark in marks] == [
        (rank, name, lost)
        for rank in (0, 1)
        for name, lost in (("rank 2 of 4 lost", [2]), ("rank 1 of 3 lost", [1]))
    ]
    assert all(0 < mark["args"]["seconds"] < seconds for mark in marks)


KILLS = [
    "0:13:forward",
    "0:5:backward",
    "1:9:update",  # the last step of an epoch
    "0:18:update",
    "1:13:forward 2:13:forward",
    "0:4:forward 1:20:backward",
    "0:1:evaluation",
    "0:3:evaluation",
    "0:1:end",
    "1:1:end",
    "0:1:forward:leave",
    "0:1:forward:leave 3:1:forward:leave 1:2:forward",
]


@pytest.mark.soak
@pytest.mark.parametrize("kills", KILLS)
def test_ranks_are_killed(kills: str, tmp_path: Path, alone: dict[str, Any]) -> None:
    """At other moments, two at once, and one after the other."""
    require_like(survive(tmp_path, 4, kills), alone)


def test_ranks_that_meet_by_gloo_are_killed(tmp_path: Path, alone: dict[str, Any]) -> None:
    summary = survive(tmp_path, 3, "0:5:backward", variables={"HVDTRAIN_ENGINE": "gloo"})
    require_like(summary, alone)
    assert summary["engine"] == "gloo"


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
        assert job.wait(300).returncode == 0
    summary = summary_of(out)
    assert (summary["global_batch_size"], summary["samples"]) == (8, 2 * SAMPLES)
    assert summary["scaled_lr"] == pytest.approx(0.02)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kill", "saved"),
    [
        ("0:13:forward", "1 epoch and 36 samples"),
        ("1:1:forward:leave", "0 epochs and 12 samples"),
    ],
)
def test_too_few_are_left(kill: str, saved: str, tmp_path: Path) -> None:
    """The ranks that are left save, and a job with enough of them goes on."""
    out = tmp_path / "out"
    run = ["-m", "hvdtrain", "run", "--elastic", "--min-np", "2", "-np", "2", "--"]
    env = {"KILLS": kill, "TOGETHER": tmp_path}
    with start([sys.executable, *run, *words(out)[2:]], env=env) as job:
        done = job.wait(300)
    assert done.returncode == 75, done.stderr
    assert f"1 rank left, fewer than --min-np 2: {saved} are saved" in done.stderr
    assert (out / "requeue").exists()
    run_ranks(words(out, "--resume", "auto"), 2, cases_expected=False)
    assert summary_of(out)["samples"] == EPOCHS * SAMPLES
