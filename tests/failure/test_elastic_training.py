"""Training goes on when ranks are killed, leave, join or are slow: with one rank's weights."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from killed_runs import (
    BATCH,
    EPOCHS,
    SAMPLES,
    TOLERATE,
    ledger_lines,
    losses,
    of_one_rank,
    require_like,
    survive,
    train,
    words,
)
from ranks import launch, run_ranks, start
from run_files import summary_of


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return of_one_rank(tmp_path_factory.mktemp("alone"))


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
    """The second one when all have noted that they continue without the first, before they do."""
    kills = "0:5:backward 1:1:log"
    summary = survive(tmp_path, 4, kills, variables={"HVDTRAIN_ENGINE": "gloo"})
    require_like(summary, alone)
    assert [each["lost"] for each in summary["failures"]] == [[0], [0]]
    assert summary["engine"] == "gloo"


@pytest.mark.soak
def test_batch_and_rate_are_rescaled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--epochs", "2", "--lr-scaling", "linear", "--elastic-batch", "rescale"]
    asked = [w for w in words(out, *more) if w not in ("--global-batch-size", str(BATCH))]
    launch(
        [*asked, "--batch-size", "4"], 3, env={"KILLS": "1:4:forward"}, launcher_args=TOLERATE
    ).end(code=0)
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
    done = start([sys.executable, *run, *words(out)[2:]], env=env).end(code=75)
    assert f"1 rank left, fewer than --min-np 2: {saved} are saved" in done.stderr
    assert (out / "requeue").exists()
    run_ranks(words(out, "--resume", "auto"), 2, cases_expected=False)
    assert summary_of(out)["samples"] == EPOCHS * SAMPLES


@pytest.mark.parametrize(
    "kills",
    [
        "1:13:forward:stop",
        *(
            pytest.param(kills, marks=pytest.mark.soak)
            for kills in (
                "0:13:backward:stop",
                "1:13:backward:hold",
                "0:9:update:hold",
                "0:1:checkpoint:stop",
                "0:1:evaluation:stop 1:1:evaluation:hold",
                "1:5:forward:stop 2:5:forward",  # the others wait for it in their recovery
            )
        ),
    ],
)
def test_a_rank_that_is_only_slow_stays(kills: str, tmp_path: Path) -> None:
    """Although the pause is longer than it takes to notice that a rank has ended."""
    survive(tmp_path, 3, kills)


def rejoin(
    folder: Path, ranks: int, kills: str, env: Mapping[str, object], *more: object
) -> dict[str, Any]:
    tolerate = [*TOLERATE, "--prtemca", "state_base_recoverable", "1"]
    done, summary = train(folder, ranks, kills, *more, variables=env, tolerate=tolerate)
    for join in summary["joins"]:
        line = f"joined after step {join['step']}: training continues with {join['ranks']} ranks"
        assert line in done.stdout, done.stdout
        assert join["joined"] == [join["ranks"] - 1]
        assert 0 < join["seconds"] < done.seconds
        assert 0 < join["start_seconds"] < done.seconds
        assert (join["global_batch_size"], join["scaled_lr"]) == (BATCH, 0.01)
    return summary


def soak(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


SHARED = ("--shard-optimizer", "--elastic-snapshot", "1step")


@pytest.mark.parametrize(
    ("ranks", "kills", "failures", "joins", "engine", "more"),
    [
        (3, "1:5:forward", [4], [5], "mpi", ()),
        soak(3, "0:5:forward", [4], [5], "mpi", ()),
        soak(3, "1:5:backward 2:5:update", None, None, "mpi", ()),
        soak(3, "0:1:evaluation", None, None, "mpi", ()),
        # It is left alone, and starts another one.
        soak(2, "1:5:forward 0:8:forward", None, None, "mpi", ()),
        # Rank 0 holds the store of addresses.
        soak(3, "0:5:forward", None, None, "gloo", ()),
        # The rank that joins takes over a part of the state; only a loss goes back to a snapshot.
        soak(3, "0:5:forward", [4], [5], "mpi", SHARED),
        # A rank that leaves is not replaced.
        soak(4, "2:1:forward:leave 1:5:forward", None, None, "mpi", ()),
        # Each rank that has joined ends in its eighth step, and is replaced.
        soak(3, "1:5:forward new:8:forward", [4, 12, 20], [5, 13, 21], "mpi", ()),
    ],
)
def test_killed_ranks_are_replaced(
    ranks: int,
    kills: str,
    failures: list[int] | None,
    joins: list[int] | None,
    engine: str,
    more: tuple[str, ...],
    tmp_path: Path,
    alone: dict[str, Any],
) -> None:
    wanted = min(ranks, 3)
    env = {"HVDTRAIN_MAX_RANKS": ranks, "AWAIT_RANKS": wanted, "HVDTRAIN_ENGINE": engine}
    summary = rejoin(tmp_path, ranks, kills, env, *more)
    require_like(summary, alone)
    assert (summary["engine"], summary["world_size"]) == (engine, wanted)
    assert summary["joins"]
    assert sum(len(each["lost"]) for each in summary["failures"]) >= len(kills.split())
    assert failures in (None, [failure["step"] for failure in summary["failures"]])
    assert joins in (None, [join["step"] for join in summary["joins"]])
