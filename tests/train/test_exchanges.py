"""What workers compute together, on every number of ranks, against what one process computes."""

from pathlib import Path

import pytest
from hosts import on_hosts
from ranks import run_ranks

WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.mark.parametrize("np", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_exchanges_follow_their_formulas(np: int) -> None:
    done = run_ranks(WORKER, np, warm="torch")
    assert len(set(done.results)) == 1


ARITHMETIC = Path(__file__).with_name("arithmetic_worker.py")


@pytest.mark.parametrize("slots", [[2], [2, 1]], ids=str)
def test_numbers_that_are_nearly_zero_or_too_large(slots: list[int], tmp_path: Path) -> None:
    alone = len(slots) == 1
    several = {"warm": "torch"} if alone else on_hosts(tmp_path, "openmpi", slots)
    for wrong in run_ranks(ARITHMETIC, sum(slots), **several).results:
        assert wrong == []


RESUMED_PLAN = Path(__file__).with_name("resumed_plan_worker.py")


def test_a_restored_bucket_plan_gives_the_same_bits(tmp_path: Path) -> None:
    """Sums of two ranks do not depend on the plan, but those of three do."""
    env = {"HVDTRAIN_SHARED_MEMORY": 0}
    done = run_ranks(RESUMED_PLAN, 3, args=[tmp_path], env=env, warm="torch")
    assert done.results == [done.results[0]] * 3
    whole, with_plan, without = done.results[0]["weights"]
    assert with_plan == whole
    assert without != whole
    first, of_another_size, of_the_first_size = done.results[0]["gradients"]
    assert of_the_first_size == first
    assert of_another_size != first
