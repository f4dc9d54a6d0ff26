"""torch.distributed's backend "hvdtrain" at 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from shared_launch import SharedLaunch

WORKER = Path(__file__).with_name("distributed_worker.py")
CASES = ["reductions", "movements", "objects", "data_parallel"]
LAUNCHES = {
    1: SharedLaunch(WORKER, 1, CASES, warm="torch"),
    2: SharedLaunch(WORKER, 2, [*CASES, "refusals"], warm="torch"),
    3: SharedLaunch(WORKER, 3, [*CASES, "refusals"], warm="torch"),
}


@pytest.mark.parametrize("np", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", [*CASES, "refusals"])
def test_operations(np: int, case: str) -> None:
    assert len(LAUNCHES[np].results(case)) == np


@pytest.mark.parametrize("np", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ddp_does_what_one_process_does(np: int) -> None:
    (expected,) = LAUNCHES[1].results("data_parallel")
    for found in LAUNCHES[np].results("data_parallel"):
        assert found == pytest.approx(expected, rel=1e-12)
