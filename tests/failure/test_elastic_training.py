"""Training goes on when ranks are killed, leave, join or are slow: with one rank's weights."""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from disturbances import PAUSES
from job import Completed
from ranks import launch, run_ranks, start
from run_files import metrics_of, summary_of
from segments import no_new_segments
from tensorflow_environment import keras_variables, tensorflow_python

from hvdtrain.train.records import MARKER

RECIPE = Path(__file__).with_name("killed_recipe.py")
SAMPLES, BATCH, EPOCHS = 100, 12, 3
STEPS = 9  # of each epoch
OPTIONS = (
    f"--global-batch-size {BATCH} --epochs {EPOCHS} --lr 0.01 --lr-scaling none "
    "--device cpu --checkpoint-every 1epoch --log-every 4"
)
TOLERATE = ["--with-ft", "ulfm"]


def words(out: Path, *more: object, recipe: object = RECIPE) -> list[str]:
    return [*f"-m hvdtrain train {recipe} --out {out} {OPTIONS}".split(), *map(str, more)]


def train(
    folder: Path,
    ranks: int,
    kills: str,
    *more: object,
    variables: Mapping[str, object] | None = None,
    recipe: object = RECIPE,
    python: Path | None = None,
    tolerate: Sequence[str] = TOLERATE,
) -> tuple[Completed, dict[str, Any]]:
    """Train while ranks kill themselves, check the files, and return the job and the summary."""
    out, ledger = folder / "out", folder / "ledger"
    env = {"KILLS": kills, "HVDTRAIN_LEDGER": ledger, **(variables or {})}
    # Servers take no steps, and some ranks may have no virtual shards.
    if not {"--strategy", "--virtual-shards"} & set(more):
        env["TOGETHER"] = folder
    with (
        no_new_segments(),
        launch(
            words(out, *more, recipe=recipe), ranks, env=env, launcher_args=tolerate, python=python
        ) as job,
    ):
        done = job.ended(600, code=0)
    summary = summary_of(out)
    assert len(set(summary["weights_sha256"])) == 1
    assert len(summary["weights_sha256"]) == summary["world_size"]
    require_each_once(ledger, ranks, [*summary["failures"], *summary["joins"]])
    lines = [(line["split"], line["step"]) for line in metrics_of(out)]
    assert len(set(lines)) == len(lines)
    return done, summary


def survive(folder: Path, ranks: int, kills: str, *more: object, **how: Any) -> dict[str, Any]:
    done, summary = train(folder, ranks, kills, *more, **how)
    lost = [kill for kill in kills.split() if not kill.endswith(PAUSES)]
    assert summary["world_size"] == ranks - len(lost)
    assert (done.stdout.count("disturbed: ") > 0) == (len(lost) < len(kills.split()))
    leaving = sum(kill.endswith(":leave") for kill in lost)
    assert sum(len(each["lost"]) for each in summary["failures"] if each["left"]) == leaving
    assert done.stdout.count(" (SIGUSR2): training continues with ") == (leaving > 0), done.stdout
    assert sum(len(failure["lost"]) for failure in summary["failures"]) == len(lost)
    assert done.stdout.count("training continues with") == len(summary["failures"]), done.stdout
    assert ("memory, taken every 4 steps" in done.stdout) == ("--elastic-snapshot" in more)
    return summary


def of_one_rank(folder: Path, *more: object, recipe: object = RECIPE, **how: Any) -> dict[str, Any]:
    out = folder / "alone"
    run_ranks(words(out, *more, recipe=recipe), 1, cases_expected=False, **how)
    return {**summary_of(out), "losses": losses(out)}


def require_like(summary: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    assert summary["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=1e-4)
    for name in ("steps", "samples", "global_batch_size", "scaled_lr"):
        assert summary[name] == alone[name], name


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(out) if line["split"] == "train"]


def ledger_lines(ledger: Path) -> list[dict[str, Any]]:
    paths = ledger.parent.glob(f"{ledger.name}.*")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def require_each_once(ledger: Path, ranks: int, changes: Sequence[Mapping[str, Any]]) -> None:
    """Check that the steps that count have used each sample once in each epoch."""
    counts = [ranks] * STEPS * EPOCHS  # by step
    for change in sorted(changes, key=lambda change: change["step"]):
        counts[change["step"] :] = [change["ranks"]] * (len(counts) - change["step"])
    used: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for line in ledger_lines(ledger):
        if counts[line["epoch"] * STEPS + line["done"] // BATCH] == line["ranks"]:
            used[line["epoch"]].update(line["samples"])
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), epoch


def soak(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


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
    # The recipe is made again after each recovery, and counts from 0: 13 steps after the first.
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


@pytest.mark.soak
@pytest.mark.parametrize(
    "kills",
    [
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
    ],
)
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
    [("0:13:forward", "1 epoch and 36 samples"), ("1:1:forward:leave", "12 samples")],
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


@pytest.mark.parametrize("ranks", [2, soak(4)])
def test_a_stop_outlives_the_rank_that_asked(ranks: int, tmp_path: Path) -> None:
    """It is killed when the stop is agreed on, and before its checkpoint is written."""
    out = tmp_path / "out"
    env = {"KILLS": "0:1:update:ask 0:1:checkpoint"}
    done = launch(words(out), ranks, env=env, launcher_args=TOLERATE).end(code=0)
    assert f"training continues with {ranks - 1} rank" in done.stdout
    assert "rank 0 was asked to stop: " in (out / MARKER).read_text()
    assert not (out / "summary.json").exists()
    run_ranks(words(out, "--resume", "auto"), ranks, cases_expected=False)
    assert summary_of(out)["samples"] == EPOCHS * SAMPLES


@pytest.mark.parametrize(
    "kills",
    [
        "1:13:forward:stop",
        soak("0:13:backward:stop"),
        soak("1:13:backward:hold"),
        soak("0:9:update:hold"),
        soak("0:1:checkpoint:stop"),
        soak("0:1:evaluation:stop 1:1:evaluation:hold"),
        soak("1:5:forward:stop 2:5:forward"),  # the others wait for it in their recovery
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


PLAIN = f"{RECIPE}:with_options"  # with the optimizer that the options name
KERAS = RECIPE.with_name("killed_keras_recipe.py")
EVERY = ("--elastic-snapshot", "4steps")
ADAM = ("--shard-optimizer", "--optimizer", "adam")


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (4, "1:13:backward"),
        pytest.param(4, "0:20:update", marks=pytest.mark.soak),
        pytest.param(4, "1:5:forward 2:13:backward", marks=pytest.mark.soak),
        pytest.param(2, "1:30:forward", marks=pytest.mark.soak),
    ],
)
def test_virtual_shards_keep_their_bits(ranks: int, kills: str, tmp_path: Path) -> None:
    """Also with 3 ranks, of which one has no shards."""
    more = "--virtual-shards", "4"
    summary = survive(tmp_path, ranks, kills, *more)
    alone = of_one_rank(tmp_path, *more)
    assert set(summary["weights_sha256"]) == set(alone["weights_sha256"])
    assert [failure["again"] for failure in summary["failures"]] == [0] * len(kills.split())


@pytest.mark.parametrize(
    ("ranks", "kills", "steps"),
    [
        # Steps since the snapshot are taken again; the one after them is that of the old ranks.
        (3, "0:15:backward", [(12, 2)]),
        # Rank 0 completes the checkpoint that is later than the snapshot before it goes on.
        soak(3, "1:11:backward", [(9, 1)]),
        soak(4, "2:1:forward", None),  # before the first snapshot
        soak(4, "0:5:forward", None),  # the first step after a snapshot
        soak(4, "1:10:forward 2:14:backward", None),
        soak(4, "1:14:forward 2:14:forward", None),
        soak(4, "0:1:forward:leave 2:13:forward", None),
        soak(4, "0:1:evaluation", None),
    ],
)
def test_a_shared_optimizer_goes_on(
    ranks: int, kills: str, steps: list[tuple[int, int]] | None, tmp_path: Path
) -> None:
    summary = survive(tmp_path, ranks, kills, *ADAM, *EVERY, recipe=PLAIN)
    require_like(summary, of_one_rank(tmp_path, "--optimizer", "adam", recipe=PLAIN))
    assert all(failure["again"] == 0 for failure in summary["failures"] if failure["left"])
    taken = [(failure["step"], failure["again"]) for failure in summary["failures"]]
    assert steps in (None, taken)


@pytest.mark.soak
def test_both_holders_of_a_state_are_killed(tmp_path: Path) -> None:
    """The last rank continues from a checkpoint, unless one of them noticed the other's end."""
    summary = survive(tmp_path, 3, "0:15:forward 1:15:forward", *ADAM, *EVERY, recipe=PLAIN)
    assert all(failure["step"] in (9, 12) for failure in summary["failures"])
    require_like(summary, of_one_rank(tmp_path, "--optimizer", "adam", recipe=PLAIN))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("exchange", "went_back_to"),
    [
        *((name, 12) for name in ("half", "nbit", "powersgd", "topk", "auto", "adasum")),
        *(("local:steps=3", 12), ("blockmomentum:block=2", 12), ("diloco:steps=4", 13)),
        ("postlocal:after=1,steps=3", None),
    ],
)
def test_exchanges_go_on(exchange: str, went_back_to: int | None, tmp_path: Path) -> None:
    """A snapshot waits until the ranks have equal weights."""
    summary = survive(tmp_path, 3, "1:15:forward", "--exchange", exchange, *EVERY)
    (failure,) = summary["failures"]
    assert went_back_to in (None, failure["step"])
    assert (summary["steps"], summary["samples"]) == (27, 300)
    # On one node, compressions send what the average sends; all but half do.
    exact = exchange in ("half", "nbit", "powersgd", "topk", "auto")
    expected = of_one_rank(tmp_path)["final"]["loss"] if exact else 0.0
    assert abs(summary["final"]["loss"] - expected) < (0.01 * expected if exact else 1)


@pytest.mark.soak
@pytest.mark.parametrize("kills", ["0:12:forward", "1:12:backward 2:13:forward"])
@pytest.mark.parametrize("strategy", ["ps:mode=sync", "ps:servers=2"])
def test_a_parameter_server_goes_on(strategy: str, kills: str, tmp_path: Path) -> None:
    more = "--strategy", strategy, "--optimizer", "adam", *EVERY
    summary = survive(tmp_path, 5, kills, *more, recipe=PLAIN)
    assert summary["samples"] == 300
    assert summary["final"]["loss"] < 1


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
@pytest.mark.parametrize(
    ("ranks", "kills", "more"),
    [
        (3, "1:67:read 2:90:read", ("--optimizer", "adam")),
        (3, "0:1:read:leave", ("--optimizer", "adam")),
        (2, "0:100:read", ("--exchange", "local:steps=3")),
    ],
)
def test_keras_goes_on(
    backend: str, ranks: int, kills: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    python = tensorflow_python()
    framework = "--framework", "keras", "--backend", backend, *EVERY, *more
    variables = keras_variables(backend)
    summary = survive(
        tmp_path, ranks, kills, *framework, recipe=KERAS, python=python, variables=variables
    )
    alone = of_one_rank(tmp_path, *framework, recipe=KERAS, python=python, env=variables)
    assert summary["samples"] == 300
    rel = 1e-3 if "adam" in more else 0.5
    assert summary["final"]["loss"] == pytest.approx(alone["final"]["loss"], rel=rel)
