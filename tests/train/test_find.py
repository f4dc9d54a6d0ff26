"""Finders of learning rates and batch sizes: the same on every rank and number of ranks."""

import re
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from paths import TESTS
from ranks import run_ranks

from hvdtrain.train.options import TrainOptions


def _losses(rates: list[float]) -> list[float]:
    """Return the losses of gradient descent on all samples of find_worker.py."""
    rows = np.random.default_rng(0).normal(size=(40, 3))
    targets, weights = rows @ np.array([[1.0], [-2.0], [3.0]]) + 1, np.zeros((3, 1))
    losses = []
    for rate in rates:
        errors = rows @ weights - targets
        losses.append(float((errors**2).mean()))
        weights -= rate * 2 / 40 * rows.T @ errors
    return losses


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_find_the_same_and_leave_nothing(tmp_path: Path, size: int) -> None:
    done = run_ranks(TESTS / "train" / "find_worker.py", size, cwd=tmp_path, warm="torch")
    said, *silent = ([case.pop("said") for case in rank] for rank in done.results)
    assert not any(map(any, silent))
    assert all(rank == done.results[0] for rank in done.results)
    assert all(case["kept"] for case in done.results[0])
    assert not list(tmp_path.iterdir())
    found, unscaled, level, stopped, infinite, never, hungry, whole, none = done.results[0]
    rates = [0.0002 * 1e5 ** (step / 99) for step in range(len(found["losses"]))]
    np.testing.assert_allclose(found["rates"], rates, rtol=1e-12)
    np.testing.assert_allclose(found["losses"][:80], _losses(rates[:80]), rtol=1e-6)
    before, last = found["losses"][:-1], found["losses"][-1]
    assert max(before) < 4 * before[0] < last  # it has diverged, and not before
    # In the steepest descent, some steps of which count together.
    number = len(list(takewhile(lambda rate: rate < 0.99 * unscaled["lr"], rates)))
    assert abs(number - int(np.diff(before).argmin())) <= 4
    assert unscaled["scaled_lr"] == unscaled["lr"]
    assert found["scaled_lr"] == pytest.approx(unscaled["lr"], rel=0.01)
    # What is printed is what is to be typed.
    typed = TrainOptions(lr=float(re.findall(r"^--lr ([\d.]+)[,:] ", said[0])[0]))
    assert (typed.lr, typed.scaled_lr(size)) == (found["lr"], found["scaled_lr"])
    assert "never fell in 100 steps" in level["failed"]
    assert infinite["losses"] == found["losses"][: len(infinite["losses"])]
    assert infinite["lr"] == pytest.approx(found["lr"], rel=0.5)
    assert never["failed"].startswith("step 1: the loss is nan on rank")
    assert stopped["failed"].startswith(f"rank {size - 1} was asked to stop")
    lacks = f"does not fit into the memory of rank {size - 1}"
    assert (set(hungry["samples_per_second"]), hungry["limit"]) == ({"2", "4"}, f"8: {lacks}")
    assert said[6].startswith(f"--batch-size {hungry['batch_size']}, ")
    rate = 0.04 if hungry["batch_size"] == 4 else 0.02
    assert f" --lr {rate} for 0.02;" in said[6] or f" --lr stays {rate};" in said[6]
    tried = ["20", "40"][: 2 if size == 1 else 1]
    assert list(whole["samples_per_second"]) == tried
    assert whole["limit"] == f"{2 * int(tried[-1])}: more than all 40 samples in a step"
    assert none["failed"] == f"--batch-size 8: {lacks}: give a smaller one"
