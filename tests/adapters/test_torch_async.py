"""Asynchronous operations, process sets and join at 1 to 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "torch_async_worker.py"


@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_any_order(np: int) -> None:
    run_ranks(WORKER, np, timeout_seconds=120)
