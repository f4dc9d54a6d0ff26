"""Numbers too small to be normal are added alike on all ranks, whichever thread of a rank adds."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks

WORKER = Path(__file__).with_name("arithmetic_worker.py")


def test_threads_that_flush_small_numbers_to_zero() -> None:
    for wrong in run_ranks(WORKER, 2, warm="torch").results:
        assert wrong == []
