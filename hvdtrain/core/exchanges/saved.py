"""The state of an exchange as plain data, which checkpoints hold."""

from __future__ import annotations

from typing import TypedDict

from hvdtrain.arrays import HostArray
from hvdtrain.core.gradients.exchange import Exchange, ExchangeState

__all__ = ["SavedExchange", "load_exchange", "save_exchange"]


class SavedExchange(TypedDict):
    """The state of an exchange on one rank, as plain data.

    Attributes:
        spec: description of the exchange.
        steps: number of steps that the program has completed.
        shared: arrays that are equal on all ranks, by name.
        own: arrays of this rank, by name.
    """

    spec: str
    steps: int
    shared: dict[str, HostArray]
    own: dict[str, HostArray]


def save_exchange(exchange: Exchange, steps: int) -> SavedExchange:
    """Return a copy of the state of an exchange (local).

    Args:
        exchange: exchange of an optimizer.
        steps: number of steps that the program has completed.
    """
    state = exchange.state()
    return SavedExchange(
        spec=exchange.spec, steps=steps, shared=dict(state.shared), own=dict(state.own)
    )


def load_exchange(exchange: Exchange, saved: SavedExchange) -> int:
    """Restore the state of an exchange (local).

    Args:
        exchange: exchange of an optimizer.
        saved: result of save_exchange() on the rank of the same number.

    Returns:
        The number of steps that the program had completed.

    Raises:
        ValueError: it is the state of another exchange.
    """
    if saved["spec"] != exchange.spec:
        raise ValueError(
            f"the state is one of exchange {saved['spec']!r}, and this is {exchange.spec!r}: make "
            "the optimizer with the same exchange, or start without its state"
        )
    exchange.load(ExchangeState(saved["shared"], saved["own"]))
    return saved["steps"]
