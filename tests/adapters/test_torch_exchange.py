"""Optimizers that exchange otherwise than by the plain average (see torch_exchange_cases)."""

from __future__ import annotations

from pathlib import Path

from hosts import AGENT_ARGS, require_hosts, write_hostfile
from ranks import run_ranks

WORKER = Path(__file__).parent / "torch_exchange_worker.py"
# Many buckets, some of them with several parameters.
SMALL = {"HVDTRAIN_BUCKET_BYTES": 600, "HVDTRAIN_FIRST_BUCKET_BYTES": 100}


def test_buckets_of_tensors() -> None:
    done = run_ranks(WORKER, 2, env={"HVDTRAIN_ENGINE": "gloo", **SMALL}, timeout_seconds=120)
    assert done.results == [0, 0]


def test_memory_that_the_host_cannot_read() -> None:
    worker, env = WORKER.with_name("torch_hidden_worker.py"), {"HVDTRAIN_ENGINE": "hidden", **SMALL}
    done = run_ranks(worker, 2, args=["exchanges"], env=env, timeout_seconds=120)
    assert done.results == [[], []]  # nothing was staged


def test_nodes_of_two_ranks_and_one(tmp_path: Path) -> None:
    require_hosts()
    done = run_ranks(
        WORKER,
        3,
        env=SMALL,
        hostfile=write_hostfile(tmp_path / "hosts", "openmpi", [2, 1]),
        launcher_args=[*AGENT_ARGS["openmpi"], *(word for name in SMALL for word in ("-x", name))],
        timeout_seconds=120,
    )
    assert done.results == [0, 0, 1]
