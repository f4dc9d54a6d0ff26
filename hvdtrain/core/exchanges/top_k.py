"""The largest elements of each gradient, with their indices, and error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, cast

import numpy as np

from hvdtrain.arrays import (
    Array,
    as_bytes,
    concatenate,
    copy,
    from_bytes,
    is_tensor,
    like_shape,
    namespace,
    zeros_like,
)
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.error_feedback import ErrorFeedback, sum_together
from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators, gather
from hvdtrain.core.gradients.exchange import FilledBucket, ParameterSlice, StepInfo, check_momentum
from hvdtrain.core.gradients.plan import BucketPlan, ParameterSpec
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType

# Elements of which a sample finds the threshold of candidates.
_SAMPLED = 1 << 14


def largest(elements: Array, count: int) -> Array:
    """Return the [count] indices of the largest magnitudes in falling order, as int64.

    Of equal magnitudes the one with the lower index comes first; NaN counts as infinite.
    """
    xp, magnitude = namespace(elements), cast("Any", abs(elements))
    chosen = _candidates(magnitude, count)
    values = magnitude[chosen]
    values = xp.where(xp.isnan(values), float("inf"), values)
    return cast("Array", chosen[_stable_order(-values)[:count]])


def _candidates(magnitude: Any, count: int) -> Any:
    """Return the indices, in order, of at least `count` elements that contain the largest ones."""
    sample = magnitude[:: max(1, magnitude.shape[0] // _SAMPLED) | 1]
    # Twice as many as are needed, so that there are hardly ever too few.
    position = 2 * count * sample.shape[0] // magnitude.shape[0] + 16
    if position < sample.shape[0]:
        in_order = sample.sort().values if is_tensor(sample) else np.sort(sample)
        threshold = in_order[-position]
        found = _nonzero(~(magnitude < threshold))
        if found.shape[0] >= count:
            return found
    return _nonzero(namespace(magnitude).ones_like(magnitude))


def _nonzero(flags: Any) -> Any:
    return flags.nonzero()[:, 0] if is_tensor(flags) else np.flatnonzero(flags)


def _stable_order(values: Any) -> Any:
    return values.argsort(stable=True) if is_tensor(values) else values.argsort(kind="stable")


# Indices have as many bits as elements.
_MOST_ELEMENTS = (1 << 31) - 1


class TopKExchange(ErrorFeedback):
    """Send the elements of largest magnitude of each matrix, and keep the others.

    Vectors are summed in full.

    Args:
        ratio: fraction of the elements of a matrix that each node sends, at least one.
        momentum: factor of momentum correction (Deep Gradient Compression): the exchange then
            accumulates the velocity of SGD, and the optimizer needs no momentum of its own.
        per_rank: compress what each rank sends, not only what each node sends.

    Raises:
        ValueError: `ratio` is not in (0, 1], or `momentum` not in [0, 1).
    """

    def __init__(self, ratio: float = 0.01, momentum: float = 0.0, per_rank: bool = False) -> None:
        super().__init__(f"topk:ratio={float(ratio)!r},momentum={float(momentum)!r}", per_rank)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, got {ratio}")
        check_momentum(momentum)
        self._ratio, self._momentum = ratio, momentum
        self._velocity = ParameterState("velocity")
        if momentum:
            self._states.append(self._velocity)
        self.exactness = (
            f"Between {self._sender}s the largest {100 * ratio:g} % of each matrix: each sends "
            f"{8 * ratio:g} bytes per element of float32 to every other one, instead of 4; what is "
            "left is added to the next step's gradients."
        )

    def prepare(self, plan: BucketPlan) -> None:
        super().prepare(plan)
        for bucket in plan.buckets:
            if bucket.dtype is DType.FLOAT32 and bucket.count > _MOST_ELEMENTS:
                raise ValueError(
                    f"topk takes buckets of at most {_MOST_ELEMENTS} elements of float32, got one "
                    f"of {bucket.count}: divide large parameters, or set HVDTRAIN_BUCKET_BYTES"
                )

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        super().reduce(bucket, info, communicators)
        if not self._momentum:
            return
        for piece in bucket.pieces(bucket.elements, 0):
            if communicators.one_node or not _is_matrix(bucket.specs[piece.index]):
                velocity = self._velocity.get(piece.name, piece.elements)
                moved = piece.elements * (1 / info.scale) + velocity * self._momentum
                piece.elements[...] = moved * info.scale
                self._velocity.put(piece.name, moved)

    @collective
    def combine(
        self,
        bucket: FilledBucket,
        elements: Array,
        start: int,
        network: Communicator,
        factor: float,
    ) -> Array:
        places = dict(zip(bucket.layout.parameters, bucket.layout.starts, strict=True))
        chosen, matrices, vectors = [], [], []
        for piece in bucket.pieces(elements, start):
            if _is_matrix(bucket.specs[piece.index]):
                place = places[piece.index] + piece.first - start
                chosen.append(self._choose(bucket, piece) + place)
                matrices.append(piece.elements)
            else:
                vectors.append(piece.elements)
        error = copy(elements)
        messages = _exchanged(chosen, elements, error, network) if chosen else []
        for part in matrices:
            part[...] = 0
        for indices, values in messages:
            elements[indices] = elements[indices] + values
        sum_together(vectors, network)
        for piece in bucket.pieces(error, start):
            if not _is_matrix(bucket.specs[piece.index]):
                piece.elements[...] = 0
        elements *= factor
        return error

    def _choose(self, bucket: FilledBucket, piece: ParameterSlice) -> Array:
        """Return the indices to send of the elements of a slice, after momentum correction."""
        count = ceil(self._ratio * piece.elements.shape[0])
        if not self._momentum:
            return largest(piece.elements, count)
        (whole,) = [p for p in bucket.pieces(bucket.elements, 0) if p.index == piece.index]
        part = slice(piece.first, piece.first + piece.elements.shape[0])
        before = self._velocity.get(piece.name, whole.elements)
        residual = self._residual.get(piece.name, whole.elements)[part]
        velocity = zeros_like(before)
        # The slice holds gradient and residual.
        velocity[part] = before[part] * self._momentum + (piece.elements - residual)
        piece.elements[...] = residual + velocity[part]
        chosen = largest(piece.elements, count)
        velocity[chosen + piece.first] = 0
        self._velocity.put(piece.name, velocity)
        return chosen


@collective
def _exchanged(
    chosen: Sequence[Array], elements: Array, error: Array, network: Communicator
) -> list[tuple[Array, Array]]:
    """Return all members' indices and values, and remove this rank's from its error."""
    indices = concatenate(chosen)
    error[indices] = 0
    # Numbers of one width: float32 with int32.
    numbers = like_shape(indices, indices.shape, f"int{8 * elements.itemsize}")
    numbers[...] = indices
    message = concatenate([as_bytes(elements[indices]), as_bytes(numbers)])
    received, half = gather(network, message), message.shape[0] // 2
    return [
        (from_bytes(received[rank, half:], numbers), from_bytes(received[rank, :half], elements))
        for rank in range(network.size)
    ]


def _is_matrix(spec: ParameterSpec) -> bool:
    return sum(length > 1 for length in spec.shape) > 1
