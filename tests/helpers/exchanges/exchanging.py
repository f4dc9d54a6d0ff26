"""Drives an exchange over buckets as a gradient step does, with the channel's own communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from exchange_formulas import Flat

from hvdtrain.arrays import HostArray, elements_of, like, to_host
from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
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
        """Cut the buckets otherwise."""
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
