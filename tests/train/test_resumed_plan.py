"""A run that goes on adds gradients in the same order as before, where MPI adds them."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks

WORKER = Path(__file__).with_name("resumed_plan_worker.py")


def test_a_restored_bucket_plan_gives_the_same_bits(tmp_path: Path) -> None:
    """Sums of two ranks do not depend on the plan, but those of three do."""
    env = {"HVDTRAIN_SHARED_MEMORY": 0}
    done = run_ranks(WORKER, 3, args=[tmp_path], env=env, timeout_seconds=300, warm="torch")
    assert done.results == [done.results[0]] * 3
    whole, with_plan, without = done.results[0]["weights"]
    assert with_plan == whole
    assert without != whole
    first, of_another_size, of_the_first_size = done.results[0]["gradients"]
    assert of_the_first_size == first
    assert of_another_size != first
