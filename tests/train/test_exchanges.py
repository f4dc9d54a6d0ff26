"""Ways to exchange buckets, on every number of ranks, against what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.mark.parametrize("np", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_exchanges_follow_their_formulas(np: int) -> None:
    done = run_ranks(WORKER, np, timeout_seconds=300, warm="torch")
    assert len(set(done.results)) == 1
