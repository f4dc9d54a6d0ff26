"""The exchange that the arguments of an optimizer stand for."""

from __future__ import annotations

from hvdtrain.core.gradients.adasum import Adasum
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.types import ReduceOp

__all__ = ["choose_exchange"]


def choose_exchange(
    exchange: object, op: ReduceOp, predivide: float, compressed: bool
) -> Exchange | None:
    """Return the exchange that was given, or that op=Adasum means; None for the plain one.

    Args:
        exchange: the argument; None where it was not given.
        op: the reduction.
        predivide: the gradient_predivide_factor.
        compressed: a compression was given.

    Raises:
        TypeError: it is no exchange.
        ValueError: the arguments do not go together.
    """
    if exchange is None:
        return Adasum() if op is ReduceOp.ADASUM else None
    if not isinstance(exchange, Exchange):
        raise TypeError(f"exchange must be an Exchange, got {type(exchange).__name__}")
    if op is not ReduceOp.AVERAGE or predivide != 1.0 or compressed:
        raise ValueError(
            f"exchange {exchange.spec!r} says itself what is sent: leave out op, compression and "
            "gradient_predivide_factor"
        )
    return exchange
