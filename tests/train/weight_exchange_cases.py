"""Exchanges of weights against formulas for all ranks on one process; for exchange_worker.py."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from exchange_formulas import BlockFormula, DiLoCoFormula, Flat, OfRanks, mean
from exchanging import (
    BITS,
    COUNTS,
    LIMITS,
    TOLERANCE,
    Driven,
    check,
    exchanged,
    kinds,
    layouts,
    of_ranks,
    plan_of,
    values,
    weighed,
)

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.block_momentum import BlockMomentum
from hvdtrain.core.exchanges.diloco import DiLoCo
from hvdtrain.core.gradients.exchange import StepInfo
from hvdtrain.types import DType


class Ranks:
    def __init__(self, start: Sequence[Flat], dtype: DType) -> None:
        self._dtype = dtype
        self.weights: OfRanks = []
        self.agree([w.astype(np.float64) for w in start])

    def step(self, step: int) -> None:
        self.weights = [
            [w + 0.25 * d for w, d in zip(ws, ds, strict=True)]
            for ws, ds in zip(self.weights, of_ranks(step, self._dtype), strict=True)
        ]

    def agree(self, weights: Sequence[Flat]) -> None:
        self.weights = [list(weights) for _ in range(hvd.size())]

    def own(self) -> list[Flat]:
        return [w.astype(self._dtype.numpy) for w in self.weights[hvd.rank()]]


def info_of(steps: int, given: Sequence[float] | None, flush: bool = False) -> StepInfo:
    info = replace(weighed(0, given), local_steps=steps * hvd.size(), flush=flush)
    if given is None:
        return replace(info, weight=float(steps), total=float(steps * hvd.size()), weighted=True)
    return info


def blocks_of_local_steps() -> int:
    """Three blocks of three steps, one that a flush ends after two, and an empty one."""
    cases = 0
    weights = [float(rank) for rank in range(1, hvd.size() + 1)]
    forms = ((0.0, 1.0, False), (0.5, 0.75, False), (0.5, 0.75, True))
    for (dtype, tensors), form in product(kinds(), forms):
        given = None if dtype is DType.FLOAT32 else weights
        block, steps = (0, 3) if given is None else (int(3 * sum(weights)), 0)
        exchange = BlockMomentum(block, steps, form[0], rate=form[1], nesterov=form[2])
        start = values(99, 0, dtype)
        driven, ranks = Driven(exchange, plan_of(dtype, LIMITS[0]), tensors), Ranks(start, dtype)
        driven.begin(start)
        formula = BlockFormula(ranks.weights[0], hvd.size(), *form)
        for count, flush in ((3, False), (3, False), (2, True), (0, True), (3, False), (0, True)):
            for step in range(count):
                ranks.step(step)
            counts = [count * weight for weight in given or [1.0] * hvd.size()]
            info = info_of(count, counts if given else None, flush)
            found = exchanged(driven, ranks.own(), info)
            if count:
                formula.block(ranks.weights, counts, count / 3, flush)
            expected = formula.model if flush else formula.start
            check(found, expected, dtype)
            formula.start = list(expected)
            ranks.agree([each.astype(np.float64) for each in found])
            driven.use_plan(plan_of(dtype, LIMITS[1]))
        cases += 1
    return cases


def an_outer_optimizer() -> int:
    cases = 0
    weights = [float(rank) for rank in range(1, hvd.size() + 1)]
    for (dtype, tensors), fragments in product(kinds(), (1, 2, 4)):
        given = None if dtype is DType.FLOAT32 else weights
        exchange = DiLoCo(steps=4, fragments=fragments)
        start = values(99, 0, dtype)
        driven, ranks = Driven(exchange, plan_of(dtype, LIMITS[1]), tensors), Ranks(start, dtype)
        driven.begin(start)
        formula = DiLoCoFormula(ranks.weights[0], 0.7, 0.9)
        chosen = [exchange._fragment_of[index] for index in range(len(COUNTS))]
        for number in range(7):
            for step in range(4 // fragments):
                ranks.step(10 * number + step)
            flush = number == 5
            found = exchanged(driven, ranks.own(), info_of(1, given, flush))
            averages = mean(ranks.weights, given or [1.0] * hvd.size())
            fragment = (number - (number > 5)) % fragments
            for index, average in enumerate(averages):
                if flush or chosen[index] == fragment:
                    new = formula.round(index, average)
                    for own in ranks.weights:
                        own[index] = new
            expected = ranks.weights[hvd.rank()]
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE[dtype])
            if flush or fragments == 1:
                check(found, expected, dtype)
        cases += 1
    return cases


def pseudo_gradients_in_few_bits() -> int:
    """Each element is rounded twice; 4 bits have 15 levels over 8 standard deviations of 0.25."""
    cases = 0
    for nodes, (dtype, tensors), kind in product(layouts(), kinds(), ("bf16", "int8", "int4")):
        exchange = DiLoCo(steps=2, fragments=2, rate=1.0, momentum=0.0, type=kind)
        start = values(99, 0, dtype)
        driven, ranks = Driven(exchange, plan_of(dtype, LIMITS[0]), tensors), Ranks(start, dtype)
        driven.begin(start)
        ranks.step(0)
        found = exchanged(driven, ranks.own(), info_of(1, None, flush=True), nodes)
        expected = mean(ranks.weights, [1.0] * hvd.size())
        exact = len(set(nodes)) == 1
        most = TOLERANCE[dtype] if exact else 8 / 15 * 0.25
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=most)
            BITS.update(one.tobytes())
        cases += 1
    return cases


WEIGHT_CASES = (
    blocks_of_local_steps,
    an_outer_optimizer,
    pseudo_gradients_in_few_bits,
)
