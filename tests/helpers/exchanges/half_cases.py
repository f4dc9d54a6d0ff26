"""Half types between nodes, compared bit by bit with a formula for all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from exchange_formulas import Flat, OfRanks, mean
from exchanging import SHAPES, Driven, plan_of, together

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, StepInfo
from hvdtrain.types import DType, ReduceOp

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Of the result and of each node: at most half a unit in the last place.
_PRECISION = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def _values(rank: int, dtype: DType) -> list[Flat]:
    """Return values with more bits than half types have, whose sums are exact in float32."""
    generator = np.random.default_rng(rank)
    counts = [int(np.prod(shape)) for shape in SHAPES]
    return [(generator.integers(-(1 << 16), 1 << 16, n) / 4096).astype(dtype.numpy) for n in counts]


def _rounded(values: Flat, kind: str) -> Flat:
    """Return values rounded by torch."""
    rounded: Flat = torch.from_numpy(values.astype(np.float32)).to(_HALF[kind]).double().numpy()
    return rounded


def _sum(values: OfRanks, nodes: Sequence[int], kind: str) -> list[Flat]:
    """Return by parameter: the nodes' sums, each rounded, and the rounded sum of these."""
    results = []
    for of_ranks in zip(*values, strict=True):
        sums = [
            sum((v for v, own in zip(of_ranks, nodes, strict=True) if own == node), 0 * of_ranks[0])
            for node in sorted(set(nodes))
        ]
        total = sum((_rounded(each, kind) for each in sums), 0 * of_ranks[0])
        results.append(_rounded(total, kind))
    return results


def half_types_cross_the_network(nodes: Sequence[int], communicators: Communicators) -> int:
    """Exchange sums and averages between nodes; return the number of cases."""
    size, cases = hvd.size(), 0
    for kind, dtype, tensors in product(_HALF, (DType.FLOAT32, DType.FLOAT64), (False, True)):
        everybody = [_values(rank, dtype) for rank in range(size)]
        exact = [[each.astype(np.float64) for each in values] for values in everybody]

        make = partial(Driven, plan=plan_of(dtype, 300), tensors=tensors)
        step = partial(_step, make, everybody[hvd.rank()], communicators)
        plain = StepInfo(0, size)
        summed = step(HalfExchange(kind, ReduceOp.SUM), plain)
        if len(set(nodes)) == 1:
            _assert_equal(summed, step(AllreduceExchange(ReduceOp.SUM), plain))
            _assert_equal(step(HalfExchange(kind), plain), step(AllreduceExchange(), plain))
        else:
            _assert_equal(summed, _sum(exact, nodes, kind))
        weights = [float(rank + 1) for rank in range(size)]
        weighted = StepInfo(0, size, None, weights[hvd.rank()], sum(weights), weighted=True)
        for predivide in (1.0, 4.0):
            found = step(HalfExchange(kind, predivide=predivide), weighted)
            largest = 2 * 16 * _PRECISION[kind]
            for one, other in zip(found, mean(exact, weights), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=largest)
        cases += 1
    return cases + _infinity_is_kept(communicators)


def _infinity_is_kept(communicators: Communicators) -> int:
    """What does not fit into fp16 is infinite on all ranks, for a loss scaler to see."""
    make = partial(Driven, plan=plan_of(DType.FLOAT32, 300), tensors=False)
    own = [np.full(each.shape, 1e30) for each in _values(0, DType.FLOAT32)]
    found = _step(make, own, communicators, HalfExchange("fp16"), StepInfo(0, hvd.size()))
    assert communicators.one_node or all(np.isinf(each).all() for each in found)
    return 1


def _step(
    make: Callable[[Exchange], Driven],
    own: Sequence[Flat],
    communicators: Communicators,
    exchange: Exchange,
    info: StepInfo,
) -> list[Flat]:
    """Return the result of an exchange of this rank's own values."""
    driven = make(exchange)
    found: list[Flat] = together(lambda _: driven.step(own, info, communicators))
    return found


def _assert_equal(found: Sequence[Flat], expected: Sequence[Flat]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
