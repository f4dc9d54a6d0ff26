"""Gradients of which only half types cross the network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np

from hvdtrain.arrays import Array, HostArray, buffer_of, elements_of, is_tensor, namespace
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Zeros
from hvdtrain.core.gradients.communicators import Communicators, slice_bounds
from hvdtrain.core.gradients.exchange import AllreduceExchange, Exchange, FilledBucket, StepInfo
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp


def to_float32(array: Array) -> Array:
    given: Any = array
    return cast("Array", given.float() if is_tensor(array) else given.astype("f4", copy=False))


def round_to_half(array: Array, half: DType) -> Array:
    """Return elements rounded to a half type, to the nearest, ties to even."""
    if is_tensor(array):
        given: Any = array
        return cast("Array", given.to(getattr(namespace(array), half.value)))
    values = cast("HostArray", array)
    rounded = _bfloat16_bits(values) if half is DType.BFLOAT16 else values.astype(np.float16)
    return cast("Array", rounded)


def widen_half(array: Array, half: DType) -> Array:
    """Return the float32 values of an array that round_to_half() has returned."""
    if is_tensor(array) or half is DType.FLOAT16:
        return to_float32(array)
    bits = cast("HostArray", array).astype(np.uint32)
    bits <<= 16
    return cast("Array", bits.view(np.float32))


def _bfloat16_bits(values: HostArray) -> HostArray:
    """Return the upper halves of float32 values, after adding what rounds to nearest even."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    rounded[np.isnan(values)] = 0x7FC0  # the addition may have made infinity or zero of it
    return rounded.astype(np.uint16)


_TYPES = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16}
_ROUNDED = (DType.FLOAT32, DType.FLOAT64)


class HalfExchange(Exchange):
    """The average or sum of all ranks' gradients, with half types between N nodes.

        x_n = half(N * sum over the ranks of node n of c_r g_r / sum(c_r))
        g = half(sum_n(x_n) / N)

    half() rounds to the half type, and sums are in float32, over the nodes in their order. For the
    sum, x_n is the sum within node n, and g = half(sum_n(x_n)). On one node it is the default
    exchange. So are buckets of other types than float32 and float64.

    Args:
        type: half type, "fp16" or "bf16".
        op: reduction, AVERAGE or SUM.
        predivide: divisor of gradients of an average before they are rounded, by which the result
            is multiplied again.

    Raises:
        ValueError: an argument is none of these.
    """

    half_types = True
    hierarchical = True
    stateless = True

    def __init__(
        self, type: str = "bf16", op: ReduceOp = ReduceOp.AVERAGE, predivide: float = 1.0
    ) -> None:
        if type not in _TYPES:
            raise ValueError(f"type must be fp16 or bf16, got {type}")
        self._name, self._half = type, _TYPES[type]
        self.op, self._predivide = op, predivide
        self._plain = AllreduceExchange(op, predivide)
        self.takes_samples = self._plain.takes_samples
        self.spec = f"half:type={type},op={op.value},predivide={float(predivide)!r}"
        self.exactness = (
            f"Rounded to {type} once for each node, and once after the sum of the nodes; exact on "
            "one node, but for the rounding of sums."
        )

    @classmethod
    def answering(cls, zeros: Zeros) -> HalfExchange:
        return cls(zeros.half, zeros.op, zeros.postscale)

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        if communicators.one_node or bucket.buffer.dtype not in _ROUNDED:
            self._plain.reduce(bucket, info, communicators)
            return
        average = self.op is ReduceOp.AVERAGE

        def combine(own: Buffer, start: int, network: Communicator) -> None:
            nodes = network.size if average else 1
            own.scale(nodes)
            elements = elements_of(own)
            rounded = round_to_half(to_float32(elements), self._half)
            factor = self._predivide / nodes if average else 1.0
            elements[...] = widen_half(self._sum(rounded, factor, network), self._half)

        prescale = info.weigh(1 / self._predivide) / info.size if average else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # loss scalers look for infinity
            communicators.over_network(bucket.buffer, combine, prescale)

    @collective
    def _sum(self, rounded: Array, factor: float, network: Communicator) -> Array:
        """Return the sum of members' arrays times a factor, rounded once; each adds a stripe."""
        send = buffer_of(rounded)
        bounds = slice_bounds(send.count, network.size)
        counts = [end - start for start, end in pairwise(bounds)]
        own = counts[network.rank]
        stripes = send.like(own * network.size)
        network.alltoall(send, stripes, counts, [own] * network.size)
        parts = elements_of(stripes)
        total = widen_half(parts[:own], self._half)
        for member in range(1, network.size):
            total = total + widen_half(parts[member * own : (member + 1) * own], self._half)
        summed = buffer_of(round_to_half(total * factor, self._half))
        network.allgather(summed, send, counts)
        return rounded

    def zeros(self, kinds: Sequence[tuple[int, DType]]) -> Zeros:
        return Zeros(tuple(kinds), self.op, postscale=self._predivide, half=self._name)
