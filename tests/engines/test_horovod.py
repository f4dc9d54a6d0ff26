"""What the horovod engine promises beyond the contract, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from horovod_environment import horovod_python
from ranks import run_ranks

WORKER = Path(__file__).with_name("horovod_worker.py")


@pytest.mark.horovod
def test_horovods_waiting_threads_give_way_to_training() -> None:
    shares = run_ranks(WORKER, 2, python=horovod_python()).results
    assert min(shares) > 0.8, shares  # Open MPI left to itself: a half
