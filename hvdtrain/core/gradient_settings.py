"""How gradients are reduced: the arguments of optimizers, checked, and what ranks count with."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvdtrain.core import context
from hvdtrain.core.gradients.exchange import (
    FORGOTTEN_STEPS,
    SAMPLES_PER_STEP,
    AllreduceExchange,
    Exchange,
    ExchangeState,
    Kind,
    SavedExchange,
    check_positive,
)
from hvdtrain.core.process_set import ProcessSet, global_process_set, require_process_set
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import ReduceOp

if TYPE_CHECKING:
    from hvdtrain.core.allocators import FindLibrary

_logger = logging.getLogger("hvdtrain")

# A number of groups in which gradients are reduced together, or lists of parameters.
Groups = int | Sequence[Sequence[object]] | None


def choose_groups(num_groups: int, groups: Groups) -> Groups:
    """Return the argument `groups` or its deprecated predecessor `num_groups`."""
    if not num_groups:
        return groups
    if groups is not None:
        raise ValueError("num_groups and groups mean the same: pass only groups")
    warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, 3)
    return num_groups


def check_groups(groups: Groups, *kinds: type) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups < 1:
            got = groups if isinstance(groups, int) else type(groups).__name__
            raise ValueError(
                "groups must be a number of groups, at least 1, or a list of lists of parameters, "
                f"got {got}"
            )
        return
    members = [member for group in groups for member in group]
    strange = [member for member in members if not isinstance(member, kinds)]
    if strange:
        raise ValueError(f"groups must hold parameters, got {strange[0]!r}")
    if len({id(member) for member in members}) < len(members):
        raise ValueError("groups has a parameter twice: it can only be in one group, once")


def group_indices(groups: Groups, parameters: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Return groups of indices into `parameters`."""
    count = len(parameters)
    if groups is None:
        return ()
    if isinstance(groups, int):
        bounds = [count * number // groups for number in range(groups + 1)]
        cut = [tuple(range(a, b)) for a, b in pairwise(bounds)]
        return tuple(group for group in cut if group)
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    lists = [tuple(number_of[id(p)] for p in group if id(p) in number_of) for group in groups]
    grouped = {number for group in lists for number in group}
    alone = [(number,) for number in range(count) if number not in grouped]
    return tuple(group for group in [*lists, *alone] if group)


def choose_exchange(
    exchange: object, op: ReduceOp, predivide: float, compression: str = "none"
) -> Exchange | None:
    """Return the exchange that is given, or implied by another argument; None for the default."""
    # Exchanges are imported when one is asked for: most programs only need the all-reduce.
    if exchange is None:
        if op is ReduceOp.ADASUM:
            from hvdtrain.core.exchanges.adasum import AdasumExchange

            return AdasumExchange()
        if compression in ("none", "own"):
            return None
        from hvdtrain.core.exchanges.half import HalfExchange

        return HalfExchange(compression, op, predivide)
    if isinstance(exchange, str):
        from hvdtrain.core.exchanges.catalog import make_exchange

        exchange = make_exchange(exchange)
    if not isinstance(exchange, Exchange):
        raise TypeError(f"exchange must be an Exchange or text, got {type(exchange).__name__}")
    if op is not ReduceOp.AVERAGE or predivide != 1.0 or compression != "none":
        raise ValueError(
            f"exchange {exchange.spec!r} says itself what is sent: leave out op, compression and "
            "gradient_predivide_factor"
        )
    return exchange


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
        check_positive("gradient_predivide_factor", self.predivide)
        if self.predivide != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=Average")
        check_groups(self.groups, object)

    def make_exchange(self) -> Exchange:
        """Return the exchange of a bucket; one with state is always the same object."""
        return self.exchange or AllreduceExchange(self.op, self.predivide)

    def save_exchange(self, steps: int, counts: Mapping[str, float | None]) -> SavedExchange:
        """Return a copy of the state of the exchange."""
        exchange, ranks = self.make_exchange(), self.process_set.size() or 0
        state = exchange.state()
        known = {name: np.array(count) for name, count in counts.items() if count is not None}
        shared = {**state.shared, **known}
        own = dict(state.own)
        return SavedExchange(spec=exchange.spec, steps=steps, ranks=ranks, shared=shared, own=own)

    def load_exchange(self, saved: SavedExchange) -> tuple[int, dict[str, float]]:
        """Restore the exchange; return the steps and the counts.

        With another number of ranks, their own arrays start over.
        """
        exchange, ranks = self.make_exchange(), self.process_set.size() or 0
        if saved["spec"] != exchange.spec:
            raise ValueError(
                f"the state belongs to exchange {saved['spec']!r}, but this is {exchange.spec!r}: "
                "create the optimizer with that exchange, or start without the state"
            )
        shared, own = dict(saved["shared"]), saved["own"]
        counts = {
            name: float(shared.pop(name))
            for name in (SAMPLES_PER_STEP, FORGOTTEN_STEPS)
            if name in shared
        }
        if saved["ranks"] != ranks:
            if own and self.process_set.included() and self.process_set.rank() == 0:
                _logger.warning(
                    f"exchange {exchange.spec!r}: its state was saved by {saved['ranks']} ranks, "
                    f"and now there are {ranks}: each rank's private state is reset"
                )
            own = {}
        exchange.load(ExchangeState(shared, own))
        return saved["steps"], counts

    @property
    def total(self) -> ReduceOp:
        """What a reduction gives: Average or Sum, as the exchange does if there is one."""
        return self.op if self.exchange is None else self.exchange.op

    def check_sample_weight(self, weight: float | None) -> None:
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
            f"{here.topology.title} sharded=True: with mpirun --with-ft ulfm the job continues "
            "without lost ranks, but not without their part of the optimizer's state: use "
            "sharded=False, or leave out --with-ft"
        )


class Weighted(Protocol):
    """The gradients of an optimizer, which ranks reduce with their weights."""

    def has(self, parameters: Set[int]) -> bool | None:
        """Return whether one of these objects, by id, is a parameter of it; None if one may be."""

    @property
    def weight(self) -> Any:
        """What this rank counts with: a number or tensor; None if ranks count alike."""


_live: weakref.WeakValueDictionary[int, Weighted] = weakref.WeakValueDictionary()
_numbers = count()


def register_weighted(optimizer: Weighted) -> None:
    """Let layers know the weight of an optimizer's gradients, while it exists."""
    _live[next(_numbers)] = optimizer


def sample_weight_of(parameters: Set[int]) -> Any:
    """Return what this rank counts with in a step of the last optimizer of these, by id.

    For parameters that no optimizer is known to have it is the weight of the last one that has a
    weight; None if different numbers were set. Values of tensors are not compared, since they may
    be known in a graph or on a device only.
    """
    found = [(each, each.has(parameters)) for _, each in sorted(_live.items(), reverse=True)]
    certain = any(has for _, has in found)
    asked = [each.weight for each, has in found if (has if certain else has is None)]
    weights = [weight for weight in asked if weight is not None]
    numbers = {float(weight) for weight in weights if isinstance(weight, Real)}
    return weights[0] if weights and (certain or len(numbers) < 2) else None
