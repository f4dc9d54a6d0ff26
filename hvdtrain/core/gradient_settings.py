"""Settings of a reduction of gradients, for all frameworks."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdtrain.core import context
from hvdtrain.core.allocators.opening import FindLibrary
from hvdtrain.core.arguments import Groups, check_groups, check_predivide
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.core.process_set import ProcessSet, global_process_set, require_process_set
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import ReduceOp


@dataclass(frozen=True)
class GradientSettings:
    """Settings of a reduction of gradients, equal on all ranks."""

    op: ReduceOp = ReduceOp.AVERAGE
    process_set: ProcessSet = global_process_set
    predivide: float = 1.0
    groups: Groups = None
    sparse_as_dense: bool = False
    exchange: Exchange | None = None
    allocator: FindLibrary | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        require_process_set(self.process_set)
        if not isinstance(self.op, ReduceOp):
            raise ValueError(f"op must be a reduction, Average for example, got {self.op!r}")
        check_predivide(self.predivide, self.op)
        check_groups(self.groups, object)

    def make_exchange(self) -> Exchange:
        """Return the exchange of a bucket; one with state is always the same object."""
        return self.exchange or AllreduceExchange(self.op, self.predivide)

    @property
    def total(self) -> ReduceOp:
        """What a reduction gives: Average or Sum, as the exchange does if there is one."""
        return self.op if self.exchange is None else self.exchange.op

    def check_sample_weight(self, weight: float | None) -> None:
        """Check a weight of this rank in the average of the next steps."""
        if weight is None:
            return
        if not 0 <= weight < float("inf"):
            raise ValueError(f"sample_weight must be a finite number >= 0, got {weight}")
        if self.op is not ReduceOp.AVERAGE:
            raise ValueError("sample_weight needs op=Average")
        if self.exchange is not None and not self.exchange.takes_samples:
            raise ValueError(
                f"exchange {self.exchange.spec!r} counts all ranks alike: leave sample_weight at "
                "None, or use another exchange"
            )

    @property
    def weights(self) -> bool:
        """Whether ranks exchange weights after steps on their own gradients."""
        return self.exchange is not None and self.exchange.kind is Kind.WEIGHTS


def check_sharding() -> None:
    """Check that ranks may share the optimizer's work and its state."""
    here = context.current() if context.is_initialized() else None
    if here is not None and here.failures is not None and not here.keeps_states:
        raise UnsupportedError(
            f"{here.topology.title} sharded=True: with mpirun --with-ft ulfm the job goes on "
            "without ranks that end, but not without their part of the optimizer's state: use "
            "sharded=False, or leave out --with-ft"
        )
