"""Lightning's Trainer at 1, 2 and 3 ranks: N ranks do what one does with the whole batch."""

from pathlib import Path
from typing import Any

import pytest
from shared_launch import SharedLaunch

WORKER = Path(__file__).with_name("lightning_worker.py")
CASES = [
    *("training", "accumulation", "uneven", "listed", "sampled", "manual", "sharing"),
    *("weight_exchange", "batch_norm", "precision", "resuming", "interrupted", "limited"),
    *("evaluation", "communication"),
]
WARM = "torch torchmetrics lightning.pytorch"
LAUNCHES = {
    1: SharedLaunch(WORKER, 1, ["alone", *CASES], warm=WARM),
    2: SharedLaunch(WORKER, 2, CASES, warm=WARM),
    3: SharedLaunch(WORKER, 3, CASES, warm=WARM),
}

# bfloat16 and float16 round, too.
TOLERANCES = {"precision": 5e-3}


def close(found: Any, expected: Any, case: str) -> bool:
    tolerance = TOLERANCES.get(case, 1e-9)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(
            close(one, other, case) for one, other in zip(found, expected, strict=True)
        )
    if isinstance(expected, dict):
        return close([*found.items()], [*expected.items()], case)
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, rel=tolerance, abs=tolerance))
    return bool(found == expected)


@pytest.mark.parametrize("np", [2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES)
def test_ranks_do_what_one_does(np: int, case: str) -> None:
    (expected,) = LAUNCHES[1].results(case)
    results = LAUNCHES[np].results(case)
    assert all(result == results[0] for result in results)
    assert close(results[0], expected, case)


def test_one_rank_does_what_lightning_does_alone() -> None:
    (expected,) = LAUNCHES[1].results("alone")
    ((found, _),) = LAUNCHES[1].results("training")
    assert close(found, expected, "training")


@pytest.mark.parametrize("np", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_each_sample_is_used_once_an_epoch(np: int) -> None:
    for _, seen in LAUNCHES[np].results("training"):
        assert seen == sorted([*range(90)] * 2)


@pytest.mark.parametrize("np", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("case", "steps"), [("resuming", [12, 12, 16]), ("interrupted", [12, 15])])
def test_training_goes_on_with_the_next_batch(np: int, case: str, steps: list[int]) -> None:
    """Three epochs of eight batches, of which the last one has six samples."""
    left = [270 - 12 * step + 6 * (step // 8) for step in steps]
    for expected, states in LAUNCHES[np].results(case):
        for found, seen in states:
            assert close(found, expected, case)
            assert max(map(seen.count, range(90))) <= 2
        assert [len(seen) for _, seen in states] == left
