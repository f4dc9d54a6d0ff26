"""torch.distributed's backend "hvdtrain" at 1, 2 and 3 ranks."""

import re
from pathlib import Path

import pytest
from ranks import launch
from shared_launch import SharedLaunch

WORKER = Path(__file__).with_name("distributed_worker.py")
CASES = ["reductions", "movements", "parts", "several", "objects", "data_parallel"]
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


def test_different_buckets_in_the_backward_pass_end_the_job_and_are_named() -> None:
    done = launch(WORKER, 2, args=["buckets_that_differ"]).end(code=1)
    assert done.stdout == ""  # of which both ranks would write what comes after
    error = (
        r"\[rank [01]/2\] RuntimeError: .*MismatchError: \[rank [01]/2\] allreduce '([^']*)': "
        r"rank 0 sent .*shape \(512,\).*; rank 1 sent .*shape \(787968,\).*\. Submit the same"
    )
    assert re.search(error, done.stderr), done.stderr
