"""Exchanges over made-up nodes, in numpy's and torch's memory, against formulas for all ranks."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from compression_cases import CASES
from compression_formulas import NBitFormula
from exchange_formulas import Flat, mean
from exchanging import (
    BITS,
    LIMITS,
    Driven,
    check,
    close,
    communicators_of,
    exchanged,
    kinds,
    layouts,
    of_ranks,
    plan_of,
    together,
    values,
    weighed,
)
from page_blocks import ROOT, blocks
from ranks import report
from weight_exchange_cases import WEIGHT_CASES

import hvdtrain.torch as hvd
from hvdtrain.buffer import Buffer
from hvdtrain.core.allreduce import adasum
from hvdtrain.core.exchanges.adasum import AdasumExchange
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.exchanges.warm_up import WarmUp
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import AllreduceExchange, FilledBucket, StepInfo
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp


def allreduce_is_the_average_of_samples() -> int:
    weights, cases = [float(rank) for rank in range(1, hvd.size() + 1)], 0
    for (dtype, tensors), given in product(kinds(), (None, weights)):
        for op, predivide in (
            (ReduceOp.AVERAGE, 1.0),
            (ReduceOp.AVERAGE, 3.0),
            (ReduceOp.SUM, 1.0),
        ):
            driven = Driven(AllreduceExchange(op, predivide), plan_of(dtype, 200), tensors)
            found = exchanged(driven, values(0, hvd.rank(), dtype), weighed(0, given))
            equal = op is ReduceOp.SUM or given is None
            expected = mean(of_ranks(0, dtype), [1.0] * hvd.size() if equal else weights)
            factor = hvd.size() if op is ReduceOp.SUM else 1
            check(found, [factor * each for each in expected], dtype)
            cases += 1
    return cases


def allreduce_has_the_bits_of_the_engines() -> int:
    weights = [float(rank) for rank in range(1, hvd.size() + 1)]
    size, total = hvd.size(), sum(weights)
    (bucket,) = plan_of(DType.FLOAT32, LIMITS[0]).buckets
    driven = Driven(
        AllreduceExchange(predivide=3.0), plan_of(DType.FLOAT32, LIMITS[0]), tensors=False
    )
    found = exchanged(driven, values(0, hvd.rank(), DType.FLOAT32), weighed(0, weights))
    own = values(0, hvd.rank(), DType.FLOAT32)
    whole = Buffer.from_array(np.concatenate([own[index] for index in bucket.parameters]))
    factors = (1.0 / 3.0 * weights[hvd.rank()] * size / total, 3.0 / size)
    together(lambda communicator: communicator.allreduce(whole, ReduceOp.SUM, *factors))
    expected = np.concatenate([found[index] for index in bucket.parameters])
    assert (whole.array() == expected).all()
    return 1


def add_slices(
    bucket: FilledBucket, communicators: Communicators, cuts: Sequence[int]
) -> list[tuple[int, int]]:
    seen = []

    def combine(own: Buffer, start: int, network: Communicator) -> None:
        seen.append((start, start + own.count))
        network.allreduce(own, ReduceOp.SUM)

    together(lambda _: communicators.over_network(bucket.buffer, combine, cuts=cuts))
    return seen


def slices_of_whole_tensors() -> int:
    own = values(0, hvd.rank(), DType.FLOAT64)
    expected = [sum(each) for each in zip(*of_ranks(0, DType.FLOAT64), strict=True)]
    for nodes in layouts():
        driven = Driven(AllreduceExchange(), plan_of(DType.FLOAT64, LIMITS[0]), tensors=False)
        driven.fill(own)
        (bucket,) = driven.buckets
        cuts = [part.start for part in bucket.parts]
        seen = add_slices(bucket, communicators_of(nodes), cuts)
        check(driven.values(), expected, DType.FLOAT64)
        assert len(seen) <= (len(set(nodes)) > 1)
        assert all({start, end} <= {*cuts, bucket.buffer.count} for start, end in seen)
    return len(layouts())


def no_samples_are_an_error() -> int:
    driven = Driven(AllreduceExchange(), plan_of(DType.FLOAT32, 200), tensors=False)
    own, info = values(0, hvd.rank(), DType.FLOAT32), weighed(0, [0.0] * hvd.size())
    with pytest.raises(ValueError, match="no rank has samples: the sample weights"):
        exchanged(driven, own, info)
    return 1


def combine_all(steps: Sequence[Flat], communicator: Communicator) -> Sequence[Flat]:
    for step in steps:
        adasum(communicator, Buffer.from_array(step))
    return steps


def adasum_combines_steps_of_each_parameter() -> int:
    for dtype, tensors in kinds():
        start = values(99, 0, dtype)
        driven = Driven(AdasumExchange(), plan_of(dtype, 200), tensors)
        driven.begin(start)
        own = values(0, hvd.rank(), dtype)
        found = exchanged(driven, own, StepInfo(0, hvd.size()))
        steps = [w - w0 for w, w0 in zip(own, start, strict=True)]
        combined = together(partial(combine_all, steps))
        for result, w0, step in zip(found, start, combined, strict=True):
            assert (result == w0 + step).all()  # bit by bit
    return 4


def first_samples_are_plain() -> int:
    """Three samples of each rank in a step, and plain averages until there are four of each."""
    plan = plan_of(DType.FLOAT64, 200)
    make = partial(WarmUp, NBitExchange(2, block=8), samples=4 * hvd.size())
    driven, counts = Driven(make(), plan, tensors=False), [3.0] * hvd.size()
    formula = NBitFormula(2, 8, range(hvd.size()), plan)
    for step in range(4):
        gradients = of_ranks(step, DType.FLOAT64)
        found = exchanged(driven, gradients[hvd.rank()], weighed(step, counts))
        plain = mean(gradients, counts)
        check(found, plain if step < 2 else formula.step(gradients), DType.FLOAT64)
    assert int(driven.exchange.state().shared["warm-up samples"]) == 6 * hvd.size()
    with pytest.raises(ValueError, match=r"set optimizer\.sample_weight before each step"):
        exchanged(Driven(make(), plan, tensors=False), gradients[hvd.rank()], weighed(0, None))
    return 1


def wires_of_the_nodes() -> int:
    for nodes in layouts():
        communicators = communicators_of(nodes)
        mine = [rank for rank, node in enumerate(nodes) if node == nodes[hvd.rank()]]
        assert communicators.node is not None
        assert (communicators.node.size, communicators.node.rank) == (
            len(mine),
            mine.index(hvd.rank()),
        )
        assert communicators.owners == min(nodes.count(node) for node in nodes)
        assert communicators.one_node == (len(mine) == hvd.size())
        assert (communicators.network is not None) == (
            len(mine) < hvd.size() and mine.index(hvd.rank()) < communicators.owners
        )
        if communicators.network is not None:
            assert communicators.network.size == len(set(nodes))
    return len(layouts())


def exchange_of_the_page() -> int:
    """The smallest one, which docs/exchanges.md shows."""
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "exchanges.md", "python")[-1], names)
    for dtype, tensors in kinds():
        driven = Driven(names["MeanOfSigns"](), plan_of(dtype, LIMITS[1]), tensors)
        found = exchanged(driven, values(0, hvd.rank(), dtype), StepInfo(0, hvd.size()))
        signs = [[np.sign(each) for each in own] for own in of_ranks(0, dtype)]
        check(found, [np.mean(each, axis=0) for each in zip(*signs, strict=True)], dtype)
    return 4


def main() -> None:
    hvd.init()
    cases = (
        wires_of_the_nodes,
        allreduce_is_the_average_of_samples,
        allreduce_has_the_bits_of_the_engines,
        slices_of_whole_tensors,
        no_samples_are_an_error,
        adasum_combines_steps_of_each_parameter,
        first_samples_are_plain,
        exchange_of_the_page,
        *CASES,
        *WEIGHT_CASES,
    )
    ran = sum(case() for case in cases)
    for nodes in layouts():
        together(partial(close, communicators_of(nodes)))
    report(ran, BITS.hexdigest())
    hvd.shutdown()


main()
