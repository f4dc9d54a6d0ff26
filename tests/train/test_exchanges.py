"""What workers compute together, on every number of ranks, against what one process computes."""

from pathlib import Path

import pytest
from hosts import on_hosts
from ranks import run_ranks

WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.mark.parametrize("np", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
def test_exchanges_follow_their_formulas(np: int) -> None:
    assert len(set(run_ranks(WORKER, np, warm="torch").results)) == 1


ARITHMETIC = Path(__file__).with_name("arithmetic_worker.py")


@pytest.mark.parametrize("slots", [[2], [2, 1]], ids=str)
def test_numbers_that_are_nearly_zero_or_too_large(slots: list[int], tmp_path: Path) -> None:
    alone = len(slots) == 1
    several = {"warm": "torch"} if alone else on_hosts(tmp_path, "openmpi", slots)
    for wrong in run_ranks(ARITHMETIC, sum(slots), **several).results:
        assert wrong == []


# Gradients that are reduced as those of TensorFlow and Keras are: in a world with buckets of a
# measured size, in one with another, and in one that was told the first size by a checkpoint.
FUSED = """
import os
import numpy as np
from ranks import report
from hvdtrain.core import context
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.arrays.fused import exchange_fused
from hvdtrain.core.gradients.plan import BucketSize
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.train.run import weights_digest
digests, size = [], None
for nbytes, restored in ((1_000_000, False), (50_000, False), (50_000, True)):
    os.environ["HVDTRAIN_BUCKET_BYTES"] = str(nbytes)
    context.init()
    here = context.current()
    if restored:
        here.bucket_sizes[here.world] = BucketSize(size, "as in the checkpoint")
    generator = np.random.default_rng(here.topology.rank)
    arrays = [generator.standard_normal(n, np.float32) for n in (90_000, 20_000, 7_001)]
    results, _ = exchange_fused(arrays, arrays, "gradients", GradientSettings(), OwnStep())
    size = size or here.bucket_sizes[here.world].nbytes
    digests.append(weights_digest({str(n): array for n, array in enumerate(results)}))
    context.shutdown()
report(3, digests)
"""


def test_a_restored_bucket_size_gives_the_same_bits() -> None:
    """Sums of two ranks do not depend on it, but those of three do."""
    done = run_ranks(["-c", FUSED], 3, env={"HVDTRAIN_SHARED_MEMORY": 0}, cases_expected=True)
    assert done.results == [done.results[0]] * 3
    first, of_another_size, of_the_first_size = done.results[0]
    assert of_the_first_size == first != of_another_size
