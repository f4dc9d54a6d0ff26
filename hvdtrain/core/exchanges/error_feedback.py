"""The common part of exchanges that compress gradients and keep what the compression loses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from hvdtrain.arrays import Array, buffer_of, concatenate, elements_of, zeros_like
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.parameter_state import ParameterState
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    Exchange,
    ExchangeState,
    FilledBucket,
    ParameterSlice,
    StepInfo,
)
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

_TYPES = (DType.FLOAT32, DType.FLOAT64)


class ErrorFeedback(Exchange):
    """Compress each node's sum of gradients, and add what was lost to the next step's sum.

    The ranks of a node add their gradients in full; the owner of a slice compresses it, and keeps
    its error.

    Args:
        spec: description on which ranks must agree, without `per_rank`.
        per_rank: whether each rank counts as a node, so that ranks of one node compress, too.
    """

    checks_finite = True
    uses_scale = True

    def __init__(self, spec: str, per_rank: bool) -> None:
        self.spec, self.hierarchical = spec + ",per_rank=True" * per_rank, not per_rank
        self._sender = "rank" if per_rank else "node"
        if not per_rank:
            self.on_one_node = "compresses nothing on one node; with per_rank=true it does"
        self._residual = ParameterState("residual")
        self._states = [self._residual]

    @abstractmethod
    @collective
    def combine(
        self,
        bucket: FilledBucket,
        elements: Array,
        start: int,
        network: Communicator,
        factor: float,
    ) -> Array:
        """Overwrite a slice with `factor` times its sum over the nodes; return what is lost, 1-d.

        Collective over the network. The residual was added to `elements`, which begin at
        `start` in the bucket; the result is to be added to those of the next step.
        """

    def prepare(self, plan: BucketPlan) -> None:
        for spec in plan.specs:
            if spec.dtype not in _TYPES:
                name = self.spec.partition(":")[0]
                raise ValueError(
                    f"{name} takes float32 and float64, {spec.name!r} is {spec.dtype.value}"
                )

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        errors: list[ParameterSlice] = []

        def combine(own: Buffer, start: int, network: Communicator) -> None:
            factor = info.scale / info.size
            error = self.combine(bucket, elements_of(own), start, network, factor)
            errors.extend(bucket.pieces(error, start))

        with np.errstate(all="ignore"):  # elements that are not finite stay so in the result
            bucket.buffer.scale(info.weigh(1 / info.scale))  # the next loss may have another one
            # All of it: another plan may have given this rank other slices.
            for piece in bucket.pieces(bucket.elements, 0):
                if self._residual.holds(piece.name):
                    elements = piece.elements
                    elements += self._residual.get(piece.name, elements)
            cuts = [part.start for part in bucket.parts] if self.whole_tensors else None
            communicators.over_network(bucket.buffer, combine, cuts=cuts)
            if communicators.one_node:
                bucket.buffer.scale(info.scale / info.size)
        self._keep(bucket, errors)

    def _keep(self, bucket: FilledBucket, errors: Sequence[ParameterSlice]) -> None:
        """Keep the errors of this rank's slice; the rest of the residual is zero."""
        found = {error.name: error for error in errors}
        for piece in bucket.pieces(bucket.elements, 0):
            error = found.get(piece.name)
            if error is not None and error.elements.shape[0] == error.count:
                self._residual.put(piece.name, error.elements)
                continue
            if error is None and not self._residual.holds(piece.name):
                continue  # no memory for zeros
            residual = zeros_like(piece.elements)
            if error is not None:
                residual[error.first : error.first + error.elements.shape[0]] = error.elements
            self._residual.put(piece.name, residual)

    def end(self, info: StepInfo) -> None:
        for state in self._states:
            state.end(info.finite, info.unused)

    def state(self) -> ExchangeState:
        kept = [state.arrays() for state in self._states]
        return ExchangeState(own={name: array for each in kept for name, array in each.items()})

    def load(self, state: ExchangeState) -> None:
        for each in self._states:
            each.load(state.own)


@collective
def sum_together(parts: Sequence[Array], network: Communicator) -> None:
    """Sum arrays over the network in one message, in place."""
    if not parts:
        return
    message, first = concatenate(parts), 0
    network.allreduce(buffer_of(message), ReduceOp.SUM)
    for part in parts:
        part[...] = message[first : first + part.shape[0]]
        first += part.shape[0]
