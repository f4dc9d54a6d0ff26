"""Training goes on when ranks are killed whose state is lost with them, or must keep its bits."""

from pathlib import Path
from typing import Any

import pytest
from killed_runs import RECIPE, of_one_rank, require_like, survive
from tensorflow_environment import keras_variables, tensorflow_python

PLAIN = f"{RECIPE}:with_options"  # with the optimizer that the options name
KERAS = RECIPE.with_name("killed_keras_recipe.py")
EVERY = ("--elastic-snapshot", "4steps")
SHARED = ("--shard-optimizer", "--optimizer", "adam")


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


def soak(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("ranks", "kills", "steps"),
    [
        # Steps since the snapshot are taken again; the one after them is that of the old ranks.
        (3, "0:15:backward", [(12, 2)]),
        # Rank 0 completes the checkpoint that is later than the snapshot before it goes on.
        soak(3, "1:11:backward", [(9, 1)]),
        # Both holders: the last rank goes on from a checkpoint, unless one noticed the other's end.
        soak(3, "0:15:forward 1:15:forward", None),
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
    summary = survive(tmp_path, ranks, kills, *SHARED, *EVERY, recipe=PLAIN)
    require_like(summary, of_one_rank(tmp_path, "--optimizer", "adam", recipe=PLAIN))
    assert all(failure["again"] == 0 for failure in summary["failures"] if failure["left"])
    taken = [(failure["step"], failure["again"]) for failure in summary["failures"]]
    assert steps in (None, taken)


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
