"""Drives an exchange over buckets as a gradient step does, on ranks of made-up nodes."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from hashlib import blake2b
from itertools import product
from typing import Any

import numpy as np
import torch
from exchange_formulas import Flat, OfRanks

import hvdtrain.torch as hvd
from hvdtrain.arrays import HostArray, elements_of, like, to_host
from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.agreement.operation import Operation, Request
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, Kind, StepInfo
from hvdtrain.core.gradients.plan import BucketPlan, ParameterSpec, make_plan
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType

# One has its rows as columns in memory, as a convolution's weights may have.
SHAPES = {(5, 7): (1, 5), (11,): (1,), (): (), (3, 2, 4): (8, 4, 1), (64,): (1,)}


class _Together(Operation):
    def __init__(self, work: Callable[[Communicator], Any]) -> None:
        super().__init__()
        self._work = work
        self.request = Request("exchanging")

    def execute(self, communicator: Communicator) -> Any:
        return self._work(communicator)


def together(work: Callable[[Communicator], Any]) -> Any:
    """Return what a function does with the world's communicator, when all ranks are there."""
    return context.current().world.run(_Together(work))


def plan_of(dtype: DType, bucket_bytes: int) -> BucketPlan:
    specs = [
        ParameterSpec(f"p{number}", shape, strides, dtype, dtype.value, "cpu")
        for number, (shape, strides) in enumerate(SHAPES.items())
    ]
    return make_plan(specs, bucket_bytes, bucket_bytes)


class Driven:
    def __init__(self, exchange: Exchange, plan: BucketPlan, tensors: bool) -> None:
        self.exchange, self._tensors = exchange, tensors
        self.use_plan(plan)

    def use_plan(self, plan: BucketPlan) -> None:
        self.plan = plan
        self.exchange.prepare(plan)
        self.buckets = [
            FilledBucket(number, self._memory(bucket.count, bucket.dtype), bucket, plan.specs)
            for number, bucket in enumerate(plan.buckets)
        ]

    def _memory(self, count: int, dtype: DType) -> Buffer:
        if self._tensors:
            return Buffer.of(torch.empty(count, dtype=getattr(torch, dtype.value)))
        return Buffer.from_array(np.empty(count, dtype.numpy))

    def _begin(self) -> None:
        for bucket in self.buckets:
            self.exchange.begin(bucket)

    def fill(self, values: Sequence[Flat]) -> None:
        for bucket in self.buckets:
            for piece in bucket.pieces(bucket.elements, 0):
                host: HostArray = values[piece.index]
                piece.elements[...] = like(host, piece.elements)

    def begin(self, weights: Sequence[Flat]) -> None:
        """Show the weights from which ranks part."""
        self.fill(weights)
        self._begin()

    def step(
        self, values: Sequence[Flat], info: StepInfo, communicators: Communicators
    ) -> list[Flat]:
        self.fill(values)
        for bucket in self.buckets:
            self.exchange.reduce(bucket, info, communicators)
        self.exchange.end(info)
        if self.exchange.kind is Kind.WEIGHTS and (info.flush or not self.exchange.partial):
            self._begin()
        return self.values()

    def values(self) -> list[Flat]:
        found: dict[int, Flat] = {}
        for bucket in self.buckets:
            for piece in bucket.pieces(elements_of(bucket.buffer), 0):
                found[piece.index] = to_host(piece.elements)
        return [found[index] for index in sorted(found)]


COUNTS = [int(np.prod(shape)) for shape in SHAPES]
LIMITS = (1 << 20, 300)
# Up to four ranks, on one node, on nodes of their own, side by side and mixed, evenly and not.
NODES = [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 1]]
TOLERANCE = {DType.FLOAT32: 2e-5, DType.FLOAT64: 1e-12}

# Of all results so far: every rank has the same.
BITS = blake2b()


def values(step: int, rank: int, dtype: DType) -> list[Flat]:
    """Return a rank's own, in the type in which buckets hold them."""
    generator = np.random.default_rng([step, rank])
    return [generator.standard_normal(count).astype(dtype.numpy) for count in COUNTS]


def of_ranks(step: int, dtype: DType) -> OfRanks:
    return [
        [each.astype(np.float64) for each in values(step, rank, dtype)]
        for rank in range(hvd.size())
    ]


def check(found: Sequence[Flat], expected: Sequence[Flat], dtype: DType) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE[dtype])
        BITS.update(one.tobytes())


def layouts() -> list[tuple[int, ...]]:
    """Return for each layout of the nodes the node of each rank of this world."""
    return list(dict.fromkeys(tuple(nodes[: hvd.size()]) for nodes in NODES))


@cache
def communicators_of(nodes: tuple[int, ...] | None) -> Communicators:
    communicators: Communicators = together(
        Communicators.flat if nodes is None else partial(Communicators.hierarchical, nodes=nodes)
    )
    return communicators


def close(communicators: Communicators, _: Communicator) -> None:
    communicators.close()


def exchanged(
    driven: Driven, own: Sequence[Flat], info: StepInfo, nodes: tuple[int, ...] | None = None
) -> list[Flat]:
    communicators = communicators_of(nodes)
    result: list[Flat] = together(lambda _: driven.step(own, info, communicators))
    return result


def weighed(step: int, weights: Sequence[float] | None) -> StepInfo:
    """Return the info of a step in which the ranks count so much, or as much as one another."""
    if weights is None:
        return StepInfo(step, hvd.size())
    rank = hvd.rank()
    return StepInfo(step, hvd.size(), None, weights[rank], sum(weights), weighted=True)


def kinds() -> Iterator[tuple[DType, bool]]:
    return product((DType.FLOAT32, DType.FLOAT64), (False, True))
