"""Training goes on when ranks are killed or leave: each sample once, and one rank's weights."""

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


def survive(
    folder: Path,
    ranks: int,
    kills: str,
    *more: object,
    variables: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Train while ranks kill themselves, check the files, and return the summary."""
    out, ledger = folder / "out", folder / "ledger"
    env = {"KILLS": kills, "HVDTRAIN_LEDGER": ledger, **(variables or {})}
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
    leaving = sum(kill.endswith(":leave") for kill in kills.split())
    assert sum(len(each["lost"]) for each in summary["failures"] if each["left"]) == leaving
    assert done.stdout.count(" (SIGUSR2): training goes on with ") == (leaving > 0), done.stdout
    assert len(set(summary["weights_sha256"])) == 1
    assert sum(len(failure["lost"]) for failure in summary["failures"]) == len(kills.split())
    assert done.stdout.count("training goes on with") == len(summary["failures"]), done.stdout
    require_each_once(ledger, ranks, summary["failures"])
    lines = [(line["split"], line["step"]) for line in metrics_of(out)]
    assert len(set(lines)) == len(lines)
    return summary


def losses(out: Path) -> list[float]:
    """Return the training loss of each epoch."""
    return [line["loss"] for line in metrics_of(out) if line["split"] == "train"]


def ledger_lines(ledger: Path) -> list[dict[str, Any]]:
    """Return what all ranks have noted of the samples of their steps."""
    paths = ledger.parent.glob(f"{ledger.name}.*")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def require_each_once(ledger: Path, ranks: int, failures: list[Mapping[str, Any]]) -> None:
    """Check that the steps that count have used each sample once in each epoch."""
    last = {ranks: float("inf")}
    for failure in failures:
        last[ranks], ranks = failure["step"], failure["ranks"]
        last[ranks] = float("inf")
    used: dict[int, Counter[int]] = {}
    for line in ledger_lines(ledger):
        if line["epoch"] * STEPS + line["done"] // BATCH < last[line["ranks"]]:
            used.setdefault(line["epoch"], Counter()).update(line["samples"])
    assert sorted(used) == list(range(EPOCHS))
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), epoch


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
    summary = survive(tmp_path, 4, "2:1:forward:leave 1:13:forward", variables=variables)
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
    assert all(0 < mark["args"]["seconds"] < 60 for mark in marks)


KILLS = [
    "0:13:forward",
    "0:5:backward",
    "1:9:update",  # the last step of an epoch
    "0:18:update",
    "1:13:forward 2:13:forward",
    "0:4:forward 1:20:backward",
    "0:1:evaluation",
    "0:3:evaluation",
    "0:1:forward:leave",
    "0:1:forward:leave 3:1:forward:leave 1:2:forward",
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
    with start([sys.executable, *run, *words(out)[2:]], env={"KILLS": kill}) as job:
        done = job.wait(120)
    assert done.returncode == 75, done.stderr
    assert f"1 rank left, fewer than --min-np 2: {saved} are saved" in done.stderr
    assert (out / "requeue").exists()
    run_ranks(words(out, "--resume", "auto"), 2, cases_expected=False)
    assert summary_of(out)["samples"] == EPOCHS * SAMPLES
