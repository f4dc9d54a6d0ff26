"""DistributedOptimizer at 1 to 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "torch_optimizer_worker.py"


@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_one_bucket(np: int) -> None:
    done = run_ranks(WORKER, np, timeout_seconds=120)
    assert done.results == [{"reduces in a thread": True}] * np


def test_many_buckets() -> None:
    env = {"HVDTRAIN_BUCKET_BYTES": 600, "HVDTRAIN_FIRST_BUCKET_BYTES": 100}
    run_ranks(WORKER, 3, env=env, timeout_seconds=120)


def test_an_mpi_without_threads() -> None:
    env = {"MPI4PY_RC_THREAD_LEVEL": "single", "HVDTRAIN_BUCKET_BYTES": 600}
    done = run_ranks(WORKER, 2, env=env, timeout_seconds=120)
    assert done.results == [{"reduces in a thread": False}] * 2
