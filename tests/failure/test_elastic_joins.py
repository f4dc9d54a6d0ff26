"""Ranks that join others at work: each sample once, and one rank's weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import launch, run_ranks
from run_files import summary_of
from segments import no_new_segments

RECIPE = Path(__file__).parent / "killed_recipe.py"
SAMPLES, BATCH, EPOCHS = 100, 12, 3
STEPS = 9  # of each epoch
OPTIONS = (
    f"--global-batch-size {BATCH} --epochs {EPOCHS} --lr 0.01 --lr-scaling none "
    "--device cpu --checkpoint-every 1epoch"
)
TOLERATE = ["--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1"]


def words(out: Path, *more: object) -> list[str]:
    asked = f"-m hvdtrain train {RECIPE} --out {out} {OPTIONS}".split()
    return [*asked, *map(str, more)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the summary of one rank."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run_ranks(words(out), 1, cases_expected=False)
    return summary_of(out)


def train(
    folder: Path, ranks: int, kills: str, env: Mapping[str, object], *more: object
) -> dict[str, Any]:
    """Train while ranks are lost and others join, check the files, and return the summary."""
    out, ledger = folder / "out", folder / "ledger"
    env = {"KILLS": kills, "HVDTRAIN_LEDGER": ledger, "TOGETHER": folder, **env}
    with (
        no_new_segments(),
        launch(words(out, *more), ranks, env=env, launcher_args=TOLERATE) as job,
    ):
        done = job.wait(600)
        if done.returncode != 0:
            job.fail(f"exit code {done.returncode}")
        job.assert_nothing_left()
    summary = summary_of(out)
    assert len(set(summary["weights_sha256"])) == 1
    assert len(summary["weights_sha256"]) == summary["world_size"]
    for join in summary["joins"]:
        line = f"joined after step {join['step']}: training continues with {join['ranks']} ranks"
        assert line in done.stdout, done.stdout
        assert join["joined"] == [join["ranks"] - 1]
        assert 0 < join["seconds"] < done.seconds
        assert 0 < join["start_seconds"] < done.seconds
        assert (join["global_batch_size"], join["scaled_lr"]) == (BATCH, 0.01)
    require_each_once(ledger, ranks, [*summary["failures"], *summary["joins"]])
    return summary


def require_each_once(ledger: Path, ranks: int, changes: Sequence[Mapping[str, Any]]) -> None:
    """Check that the steps that count have used each sample once in each epoch."""
    counts: dict[int, int] = {}  # number of ranks by step
    for step in range(STEPS * EPOCHS):
        counts[step] = ranks
        for change in sorted(changes, key=lambda change: change["step"]):
            if change["step"] <= step:
                counts[step] = change["ranks"]
    used: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for path in ledger.parent.glob(f"{ledger.name}.*"):
        for line in map(json.loads, path.read_text().splitlines()):
            if counts[line["epoch"] * STEPS + line["done"] // BATCH] == line["ranks"]:
                used[line["epoch"]].update(line["samples"])
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), epoch


def require_like(summary: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    assert summary["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=1e-4)
    for name in ("steps", "samples", "global_batch_size", "scaled_lr"):
        assert summary[name] == alone[name], name


def test_a_killed_rank_is_replaced(tmp_path: Path, alone: dict[str, Any]) -> None:
    env = {"HVDTRAIN_MAX_RANKS": 3, "AWAIT_RANKS": 3}
    summary = train(tmp_path, 3, "1:5:forward", env)
    require_like(summary, alone)
    assert [(f["step"], f["lost"], f["ranks"]) for f in summary["failures"]] == [(4, [1], 2)]
    assert [(j["step"], j["joined"], j["ranks"]) for j in summary["joins"]] == [(5, [2], 3)]


@pytest.mark.soak
@pytest.mark.parametrize("kills", ["0:5:forward", "1:5:backward 2:5:update", "0:1:evaluation"])
def test_killed_ranks_are_replaced(kills: str, tmp_path: Path, alone: dict[str, Any]) -> None:
    summary = train(tmp_path, 3, kills, {"HVDTRAIN_MAX_RANKS": 3, "AWAIT_RANKS": 3})
    require_like(summary, alone)
    assert summary["world_size"] == 3


@pytest.mark.soak
def test_a_rank_that_has_joined_replaces_the_others(tmp_path: Path, alone: dict[str, Any]) -> None:
    """It is left alone, and starts another one."""
    env = {"HVDTRAIN_MAX_RANKS": 2, "AWAIT_RANKS": 2}
    summary = train(tmp_path, 2, "1:5:forward 0:8:forward", env)
    require_like(summary, alone)
    assert [failure["lost"] for failure in summary["failures"]] == [[1], [0]]
    assert [join["joined"] for join in summary["joins"]] == [[1], [1]]


@pytest.mark.soak
def test_a_rank_that_meets_others_by_gloo_is_replaced(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    env = {"HVDTRAIN_ENGINE": "gloo", "HVDTRAIN_MAX_RANKS": 3, "AWAIT_RANKS": 3}
    summary = train(tmp_path, 3, "0:5:forward", env)  # which holds the store of addresses
    require_like(summary, alone)
    assert (summary["engine"], summary["world_size"]) == ("gloo", 3)


@pytest.mark.soak
def test_ranks_that_share_an_optimizer_are_replaced(tmp_path: Path, alone: dict[str, Any]) -> None:
    """The rank that joins takes over a part of the state; only a loss goes back to a snapshot."""
    env = {"HVDTRAIN_MAX_RANKS": 3, "AWAIT_RANKS": 3}
    more = ["--shard-optimizer", "--elastic-snapshot", "1step"]
    summary = train(tmp_path, 3, "0:5:forward", env, *more)
    require_like(summary, alone)
    assert [failure["step"] for failure in summary["failures"]] == [4]
    assert [join["step"] for join in summary["joins"]] == [5]


@pytest.mark.soak
def test_a_rank_that_leaves_is_not_replaced(tmp_path: Path, alone: dict[str, Any]) -> None:
    env = {"HVDTRAIN_MAX_RANKS": 4, "AWAIT_RANKS": 3}
    summary = train(tmp_path, 4, "2:1:forward:leave 1:5:forward", env)
    require_like(summary, alone)
    assert (summary["world_size"], len(summary["joins"])) == (3, 1)


@pytest.mark.soak
def test_ranks_are_lost_that_have_joined(tmp_path: Path, alone: dict[str, Any]) -> None:
    """Each ends in its eighth step, and is replaced."""
    env = {"HVDTRAIN_MAX_RANKS": 3, "AWAIT_RANKS": 3}
    summary = train(tmp_path, 3, "1:5:forward new:8:forward", env)
    require_like(summary, alone)
    assert [failure["step"] for failure in summary["failures"]] == [4, 12, 20]
    assert [join["step"] for join in summary["joins"]] == [5, 13, 21]
