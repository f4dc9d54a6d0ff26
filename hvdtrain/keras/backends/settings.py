"""Settings of a reduction of gradients, for all backends."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.core.arguments import Groups, check_groups, check_predivide, choose_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.core.process_set import ProcessSet, global_process_set, require_process_set
from hvdtrain.keras.backends.compression import Compression, Compressor
from hvdtrain.types import ReduceOp

__all__ = ["GradientSettings"]


@dataclass(frozen=True)
class GradientSettings:
    """Settings of a reduction of gradients.

    Attributes:
        op: Average or Sum.
        process_set: ranks that take part; other ranks keep their own gradients.
        compression: compressor, which rounds gradients before the reduction.
        sparse_as_dense: make tf.IndexedSlices dense instead of gathering the slices.
        predivide: divisor of gradients before the sum of an average, predivide/size comes after.
        groups: number of groups that are reduced together, or lists of variables.
        exchange: exchange that replaces op and compression; None for these.

    Raises:
        TypeError: `process_set` is not a process set, or `exchange` is not an exchange.
        ValueError: arguments are invalid or exclude each other.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    process_set: ProcessSet = global_process_set
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: Groups = None
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        require_process_set(self.process_set)
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum, got {self.op!r}")
        check_predivide(self.predivide, self.op)
        check_groups(self.groups, object)
        compressed = self.compression is not Compression.none
        exchange = choose_exchange(self.exchange, self.op, self.predivide, compressed)
        if exchange is not None and exchange.kind is not Kind.GRADIENTS:
            raise ValueError(
                f"exchange {exchange.spec!r} exchanges weights, and optimizers of Keras exchange "
                "gradients only: use hvdtrain.torch"
            )
