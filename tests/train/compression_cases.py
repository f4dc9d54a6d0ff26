"""Exchanges that compress gradients: what is applied and what is kept is what ranks have given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from compression_formulas import NBitFormula
from exchange_formulas import Flat, mean
from exchange_ranks import (
    COUNTS,
    LIMITS,
    TOLERANCE,
    check,
    exchanged,
    layouts,
    of_ranks,
    values,
    weighed,
)
from exchanging import Driven, plan_of

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.gradients.exchange import Exchange, StepInfo
from hvdtrain.core.objects import allgather_object
from hvdtrain.types import DType

__all__ = ["CASES"]

MAKERS: Sequence[Callable[[], Exchange]] = (
    lambda: NBitExchange(block=8),
    lambda: NBitExchange(4, block=8),
    lambda: NBitExchange(2, block=0),
)
BOUNDED = (MAKERS[0],)
# Both types and both kinds of memory, in as few steps as do.
KINDS = ((DType.FLOAT32, True), (DType.FLOAT64, False))


def residuals(exchange: Exchange) -> list[Flat]:
    """Return the sums of all ranks' residuals, by parameter."""
    own = [
        [state[f"residual.{index}"].astype(np.float64).reshape(-1) for index in range(len(COUNTS))]
        for state in allgather_object(exchange.state().own, "residuals")
    ]
    return [sum(each) for each in zip(*own, strict=True)]


def nothing_is_lost() -> int:
    """Several steps, the third with other buckets, the fourth not finite; rank 0 has no samples."""
    cases = 0
    weights = [float(rank) for rank in range(hvd.size())] if hvd.size() > 1 else [2.0]
    for make, nodes in product(MAKERS, layouts()):
        dtype, tensors = KINDS[cases % 2]
        given = None if dtype is DType.FLOAT32 else weights
        driven = Driven(make(), plan_of(dtype, LIMITS[0]), tensors)
        rest = [np.zeros(count) for count in COUNTS]
        for step, finite in enumerate((True, True, True, False, True)):
            if step == 2:
                driven.use_plan(plan_of(dtype, LIMITS[1]))
            info = replace(weighed(step, given), finite=finite)
            found = exchanged(driven, values(step, hvd.rank(), dtype), info, nodes)
            if finite:
                whole = mean(of_ranks(step, dtype), given or [1.0] * hvd.size())
                rest = [r + w - f for r, w, f in zip(rest, whole, found, strict=True)]
            check(found, found, dtype)
        kept = [residual / hvd.size() for residual in residuals(driven.exchange)]
        for one, other in zip(rest, kept, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=4 * TOLERANCE[dtype])
        if len(set(nodes)) == 1:
            assert max(np.abs(residual).max() for residual in kept) == 0.0
        cases += 1
    return cases


def n_bit_follows_its_formula() -> int:
    cases = 0
    for (bits, block), nodes in product(((1, 8), (2, 8), (4, 16), (8, 8), (1, 0)), layouts()):
        plan = plan_of(DType.FLOAT64, LIMITS[1])
        driven = Driven(NBitExchange(bits, block), plan, tensors=False)
        formula = NBitFormula(bits, block, nodes, plan)
        for step in range(3):
            own, info = values(step, hvd.rank(), DType.FLOAT64), StepInfo(step, hvd.size())
            found = exchanged(driven, own, info, nodes)
            check(found, formula.step(of_ranks(step, DType.FLOAT64)), DType.FLOAT64)
        cases += 1
    return cases


def state_of_compression_goes_through_a_checkpoint() -> int:
    """Two steps, then two more with the same exchange, and with one that has loaded its state."""
    for cases, make in enumerate(MAKERS):
        dtype, tensors = KINDS[cases % 2]
        exchange, plan = make(), plan_of(dtype, LIMITS[1])
        driven = Driven(exchange, plan, tensors)
        results = []
        for step in range(4):
            if step == 2:
                saved = exchange.state()
            results.append(step_of(driven, step, dtype))
        resumed = Driven(make(), plan, tensors)
        resumed.exchange.load(saved)
        for step in (2, 3):
            for one, other in zip(step_of(resumed, step, dtype), results[step], strict=True):
                assert (one == other).all()
    return len(MAKERS)


def step_of(driven: Driven, step: int, dtype: DType) -> list[Flat]:
    """Take a step in which each rank is a node."""
    return exchanged(driven, values(step, hvd.rank(), dtype), StepInfo(step, hvd.size()))


def what_is_not_finite_shows() -> int:
    """An infinite gradient of one rank: no rank takes the result for a good one, nor keeps it."""
    for make, (dtype, tensors) in product(MAKERS, KINDS):
        driven = Driven(make(), plan_of(dtype, LIMITS[0]), tensors)
        step_of(driven, 0, dtype)
        before = driven.exchange.state().own
        own = values(1, hvd.rank(), dtype)
        if hvd.rank() == 0:
            for each, bad in zip(own, (np.inf, np.nan, -np.inf, np.nan, np.inf), strict=True):
                each[-1] = bad
        found = exchanged(driven, own, StepInfo(1, hvd.size(), finite=False))
        assert not any(np.isfinite(each).all() for each in found)
        after = driven.exchange.state().own
        assert before.keys() == after.keys()
        assert all((before[name] == after[name]).all() for name in before)
    return len(MAKERS) * len(KINDS)


def errors_stay_bounded() -> int:
    """In 100 steps with gradients at random the residual stops growing."""
    if hvd.size() != 2:
        return 0
    for make in BOUNDED:
        driven = Driven(make(), plan_of(DType.FLOAT32, LIMITS[0]), tensors=False)
        norms = []
        for step in range(100):
            step_of(driven, step, DType.FLOAT32)
            if step in (20, 99):
                kept = driven.exchange.state().own
                norms.append(float(np.sqrt(sum((each**2).sum() for each in kept.values()))))
        assert norms[1] <= 1.5 * norms[0]
    return len(BOUNDED)


CASES = (
    nothing_is_lost,
    n_bit_follows_its_formula,
    state_of_compression_goes_through_a_checkpoint,
    what_is_not_finite_shows,
    errors_stay_bounded,
)
