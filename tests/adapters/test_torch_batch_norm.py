"""SyncBatchNorm at 2 to 4 ranks; test_torch_optimizer has it at 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks


@pytest.mark.parametrize("np", [2, 3, 4])
def test_equals_batch_norm_on_the_whole_batch(np: int) -> None:
    run_ranks(Path(__file__).parent / "torch_batch_norm_worker.py", np)
