"""Simulated ranks make the calls of real ones, and keep to the protocol."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hvdtrain_bench.scaling.paper import PRESETS, Cluster, Link
from hvdtrain_bench.scaling.simulated_network import BrokenRulesError, seen, tree_steps
from hvdtrain_bench.scaling.simulation import (
    PROGRAMS,
    SCENARIOS,
    simulate_operation,
    simulate_recovery,
)
from model_rank import believes_one_rank
from ranks import launch, run_ranks

from hvdtrain.core.agreement import queue
from hvdtrain.engines.communicator import pause_seconds

WORKER = Path(__file__).parent / "counted_worker.py"
CLUSTER = Cluster(PRESETS["hdr"], Link("shared memory", 0.5e-6, 10e9), 8)
BETWEEN_NODES = {"HVDTRAIN_SHARED_MEMORY": 0, "HVDTRAIN_STALL_SECONDS": 0}
MANY = [8, 16, 32, 64]


def soak(*sizes: int) -> list[object]:
    return [pytest.param(size, marks=pytest.mark.soak) for size in sizes]


@pytest.mark.parametrize("size", [2, 5, *soak(*MANY)])
def test_real_ranks_make_these_calls(size: int) -> None:
    simulated = {name: simulate_operation(name, CLUSTER, size).calls for name in PROGRAMS}
    expected = {name: [list(call) for call in calls] for name, calls in simulated.items()}
    job = run_ranks(WORKER, size, args=["programs"], env=BETWEEN_NODES)
    assert job.results == [expected] * size


@pytest.mark.parametrize("size", [3, *soak(*MANY)])
def test_real_ranks_recover_with_these_calls(size: int) -> None:
    expected = [list(call) for call in simulate_recovery(CLUSTER, size).calls]
    ulfm = ["--with-ft", "ulfm"]
    with launch(WORKER, size, args=["recovery"], env=BETWEEN_NODES, launcher_args=ulfm) as job:
        job.ended(code=0)
        assert job.results_of_those_left(list(range(size - 1))) == [expected] * (size - 1)


def sent(size: int, votes: int, folder: Path) -> Counter[tuple[int, int]]:
    """Return how many messages real ranks send to each other, as Open MPI counts them."""
    files = folder / str(votes)
    settings = {"enable": 1, "enable_output": 3, "filename": files}
    options = [
        w for key, value in settings.items() for w in ("--mca", f"pml_monitoring_{key}", value)
    ]
    how = {"args": ["votes", votes], "env": BETWEEN_NODES, "launcher_args": options}
    run_ranks(WORKER, size, **how)  # type: ignore[arg-type]
    found = Counter[tuple[int, int]]()
    for path in folder.glob(f"{votes}.*.prof"):
        for words in map(str.split, path.read_text().splitlines()):
            if words[0] in ("E", "I"):  # as in "E 0 1 252 bytes 13 msgs sent"
                found[int(words[1]), int(words[2])] += int(words[5])
    return found


@pytest.mark.parametrize("size", [6, *soak(2, 13, *MANY)])
def test_votes_of_real_ranks_take_this_tree(size: int, tmp_path: Path) -> None:
    steps = [zip(*pairs, strict=True) for pairs in tree_steps(size)]
    tree = Counter((int(source), int(target)) for pairs in steps for source, target in pairs)
    difference = sent(size, 10, tmp_path)
    difference.subtract(sent(size, 0, tmp_path))
    assert +difference == Counter({pair: 10 * count for pair, count in tree.items()})


@pytest.mark.parametrize("size", [1000, *soak(10_000)])
def test_many_ranks(size: int) -> None:
    found = {name: scenario(CLUSTER, size, 0) for name, scenario in SCENARIOS.items()}
    *_, stall, recovery = found.values()
    assert stall.result.endswith(f"ranks 0-{size - 2} wait for rank {size - 1}")
    assert recovery.result == f"without {size - 1}"
    assert max(one.votes for one in found.values()) == 2
    # What a rank receives grows with the number of ranks, and no faster.
    assert stall.nbytes == 512 * size
    assert max(one.nbytes for one in found.values()) < 1100 * size


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "transition", believes_one_rank)
    with pytest.raises(BrokenRulesError, match="ranks are in different calls"):
        simulate_operation("one that differs", CLUSTER, 100)


def test_ranks_look_as_often_as_they_do() -> None:
    waits = np.geomspace(1e-5, 10, 1000)
    late = seen(np.zeros(1000), waits) - waits
    pauses = np.array([pause_seconds(wait) or 1e-6 for wait in waits])
    assert (late >= 0).all()
    assert (late <= pauses + 1e-9).all()
    assert late[waits > 1].max() > 0.9 * pauses.max()
