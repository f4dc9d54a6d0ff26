"""The state of an exchange on all ranks: gathered for a checkpoint, and given back to the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.core import context
from hvdtrain.core.exchanges.saved import SavedExchange
from hvdtrain.core.objects import broadcast_object, gather_object
from hvdtrain.train.config.plain_text import counted

__all__ = [
    "ExchangeRecord",
    "RankState",
    "RecordHeader",
    "RestoredExchange",
    "gather_record",
    "lost_text",
    "scatter_record",
]


class RankState(TypedDict):
    """What belongs to one rank alone.

    Attributes:
        own: arrays of the exchange, by name.
        optimizer: state of the rank's optimizer; empty if it is equal on all ranks.
    """

    own: dict[str, HostArray]
    optimizer: Mapping[Any, Any]


class ExchangeRecord(TypedDict):
    """The state of an exchange on all ranks, as a checkpoint holds it.

    Attributes:
        spec: description of the exchange.
        steps: number of steps that the program has completed.
        shared: arrays that are equal on all ranks, by name.
        ranks: state of each rank, by rank.
    """

    spec: str
    steps: int
    shared: dict[str, HostArray]
    ranks: list[RankState]


def gather_record(saved: SavedExchange, optimizer: Mapping[Any, Any]) -> ExchangeRecord | None:
    """Return the state of all ranks on rank 0, and None on the others (collective).

    Args:
        saved: state of the exchange on this rank.
        optimizer: state of this rank's optimizer; empty if it is equal on all ranks.
    """
    mine = RankState(own=saved["own"], optimizer=optimizer)
    ranks = gather_object(mine, name="exchange")
    if ranks is None:
        return None
    return ExchangeRecord(
        spec=saved["spec"], steps=saved["steps"], shared=saved["shared"], ranks=ranks
    )


@dataclass(frozen=True)
class RestoredExchange:
    """What a checkpoint brings back to this rank.

    Attributes:
        saved: state of the exchange; without arrays of this rank if they cannot be carried over.
        optimizer: state of this rank's optimizer; empty if it is equal on all ranks.
    """

    saved: SavedExchange
    optimizer: Mapping[Any, Any]


@dataclass(frozen=True)
class RecordHeader:
    """A record without the states of the ranks.

    Attributes:
        saved: state of the exchange, without arrays of a rank.
        own: whether any rank has arrays of its own.
        optimizers: whether any rank has the state of an optimizer of its own.
    """

    saved: SavedExchange
    own: bool
    optimizers: bool


def scatter_record(
    record: ExchangeRecord | None, spec: str | None
) -> tuple[RestoredExchange | None, str]:
    """Return what this rank can restore, and what is lost (collective).

    Args:
        record: content of a checkpoint on rank 0, None if it holds none; ignored on other ranks.
        spec: description of the exchange of this run; None for one without state.

    Returns:
        What can be restored, if anything, and one line on what starts anew; "" if nothing does.
    """
    topology = context.current().topology
    header: RecordHeader | None = broadcast_object(record and _header(record), name="exchange")
    lost = lost_text(header, spec, topology.size)
    if header is None or header.saved["spec"] != spec:
        return None, lost
    mine = RankState(own={}, optimizer={})
    if header.saved["ranks"] == topology.size:
        for rank in range(topology.size):
            state = broadcast_object(record and record["ranks"][rank], name=f"exchange of {rank}")
            mine = state if rank == topology.rank else mine
    own = {name: np.asarray(array) for name, array in mine["own"].items()}
    return RestoredExchange({**header.saved, "own": own}, mine["optimizer"]), lost


def lost_text(header: RecordHeader | None, spec: str | None, size: int) -> str:
    """Return one line on what of an exchange a resumed run does not carry over; "" if nothing.

    Args:
        header: description of what the checkpoint holds; None if it holds nothing.
        spec: description of the exchange of this run; None for one without state.
        size: number of ranks of this run.
    """
    before = None if header is None else header.saved["spec"]
    if before != spec:
        begins = f"exchange {spec!r} begins anew" if spec else "its state is not used"
        return f"the checkpoint was made with exchange {before or 'average'!r}: {begins}"
    if header is None or header.saved["ranks"] == size:
        return ""
    parts = []
    if header.own:
        parts.append(f"what each rank kept for exchange {spec!r} begins anew")
    if header.optimizers:
        parts.append("all ranks go on with the optimizer state of rank 0")
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
