"""How gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.core.gradients.allreduce import AllreduceExchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.core.process_set import ProcessSet, require_process_set
from hvdtrain.torch.operations.compression import Compression, Compressor
from hvdtrain.types import ReduceOp

__all__ = ["GradientSettings"]


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are reduced.

    Attributes:
        op: AVERAGE or SUM.
        process_set: the ranks that take part.
        compression: how gradients are rounded before they are added.
        passes: backward passes that add up locally before a reduction.
        predivide: the average is (1/predivide before, predivide/size after) the sum.
        groups: indices of parameters that are reduced together.
        sparse_as_dense: make sparse gradients dense, instead of gathering their elements.
        exchange: what is done with a bucket, instead of the average or sum.

    Raises:
        TypeError: `process_set` is none.
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
        """Return what is done with a bucket; one that keeps something is always the same."""
        return self.exchange or AllreduceExchange(self.op, self.predivide)

    @property
    def weights(self) -> bool:
        """Whether ranks exchange weights, and step on gradients of their own."""
        return self.exchange is not None and self.exchange.kind is Kind.WEIGHTS

    def __post_init__(self) -> None:
        require_process_set(self.process_set)
