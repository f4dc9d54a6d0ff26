"""The state of an exchange on all ranks: gathered for a checkpoint, and given back to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypedDict

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.exchanges.saved import SavedExchange
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.objects import broadcast_object, gather_object, scatter_object
from hvdtrain.train.options.config_file import counted

# The state of an optimizer, as a checkpoint of its framework holds it.
OptimizerState: TypeAlias = Mapping[Any, Any]


class RankState(TypedDict):
    """What belongs to one rank alone."""

    own: dict[str, HostArray]
    optimizer: OptimizerState


class ExchangeRecord(TypedDict):
    """The state of an exchange on all ranks, as a checkpoint holds it."""

    spec: str
    steps: int
    shared: dict[str, HostArray]
    ranks: list[RankState]


class HasExchange(Protocol):
    """A DistributedOptimizer of any framework."""

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks step on their own gradients, and exchange weights afterwards."""

    def exchange_state(self) -> SavedExchange:
        """Return the state of the exchange."""

    def load_exchange_state(self, state: SavedExchange) -> None:
        """Restore the state of the exchange."""


@collective
def exchange_record(
    exchange: Exchange | None, optimizer: HasExchange, state: Callable[[], OptimizerState]
) -> ExchangeRecord | None:
    """Return the state of an exchange on all ranks."""
    if exchange is None:
        return None
    saved = optimizer.exchange_state()
    own = state() if optimizer.exchanges_weights else {}
    ranks = gather_object(RankState(own=saved["own"], optimizer=own), name="exchange")
    if ranks is None:
        return None
    return ExchangeRecord(
        spec=saved["spec"], steps=saved["steps"], shared=saved["shared"], ranks=ranks
    )


@dataclass(frozen=True)
class RecordHeader:
    """A record without the states of the ranks."""

    saved: SavedExchange
    own: bool
    optimizers: bool


@collective
def restore_exchange(
    record: ExchangeRecord | None,
    exchange: Exchange | None,
    optimizer: HasExchange,
    load: Callable[[OptimizerState], None],
) -> str:
    """Restore the state of an exchange."""
    topology, spec = context.current().topology, None if exchange is None else exchange.spec
    header: RecordHeader | None = broadcast_object(record and _header(record), name="exchange")
    lost = lost_text(header, spec, topology.size)
    if header is None or header.saved["spec"] != spec:
        return lost
    mine = RankState(own={}, optimizer={})
    if header.saved["ranks"] == topology.size:
        states = record["ranks"] if record is not None and topology.rank == 0 else None
        mine = scatter_object(states, name="exchange")
    own = {name: np.asarray(array) for name, array in mine["own"].items()}
    optimizer.load_exchange_state({**header.saved, "own": own})
    if mine["optimizer"]:
        load(mine["optimizer"])
    return lost


def lost_text(header: RecordHeader | None, spec: str | None, size: int) -> str:
    """Return one line on the state of an exchange that a resumed run drops; "" if none."""
    before = None if header is None else header.saved["spec"]
    if before != spec:
        begins = f"exchange {spec!r} starts from the beginning" if spec else "its state is not used"
        return f"the checkpoint was made with exchange {before or 'average'!r}: {begins}"
    if header is None or header.saved["ranks"] == size:
        return ""
    parts = []
    if header.own:
        parts.append(f"each rank's private state of exchange {spec!r} is reset")
    if header.optimizers:
        parts.append("all ranks continue with the optimizer state of rank 0")
    ranks = counted(header.saved["ranks"], "rank")
    lost = f"the checkpoint is one of {ranks}, and this run has {size}: {', and '.join(parts)}"
    return lost if parts else ""


def _header(record: ExchangeRecord) -> RecordHeader:
    # A checkpoint of torch holds tensors.
    shared = {name: np.asarray(array) for name, array in record["shared"].items()}
    ranks = record["ranks"]
    return RecordHeader(
        SavedExchange(
            spec=record["spec"], steps=record["steps"], ranks=len(ranks), shared=shared, own={}
        ),
        any(state["own"] for state in ranks),
        any(state["optimizer"] for state in ranks),
    )
