"""How gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.process_set import ProcessSet, require_process_set
from hvdtrain.torch.operations.compression import Compression, Compressor
from hvdtrain.types import ReduceOp

__all__ = ["GradientSettings"]


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are reduced.

    Attributes:
        op: AVERAGE or SUM.
        process_set: ranks that take part.
        compression: how gradients are rounded before the reduction.
        passes: backward passes accumulated locally before a reduction.
        predivide: factor f of the average: gradients are multiplied by 1/f before the sum and by
            f/size after it.
        groups: indices of parameters that are reduced together.
        sparse_as_dense: convert sparse gradients to dense ones instead of gathering their elements.
        exchange: algorithm that replaces the average or sum.

    Raises:
        TypeError: `process_set` is not a process set.
    """

    op: ReduceOp
    process_set: ProcessSet
    compression: type[Compressor] = Compression.none
    passes: int = 1
    predivide: float = 1.0
    groups: tuple[tuple[int, ...], ...] = ()
    sparse_as_dense: bool = False
    exchange: Exchange | None = None

    def make_exchange(self) -> Exchange:
        """Return the algorithm that reduces a bucket; one with state is always the same object."""
        return self.exchange or AllreduceExchange(self.op, self.predivide)

    def __post_init__(self) -> None:
        require_process_set(self.process_set)
