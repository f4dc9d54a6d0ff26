"""Warnings that are logged once, by rank 0 or the first rank of a process set."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import TYPE_CHECKING

from hvdtrain.core import context

if TYPE_CHECKING:
    from hvdtrain.core.gradients.communicators import Communicators
    from hvdtrain.core.gradients.exchange import Exchange

_logger = logging.getLogger("hvdtrain")


def note_staging(what: str, device: str) -> None:
    """Log that data on a type of device is copied through the host."""
    here, kind = context.current(), device.partition(":")[0]
    if not here.topology.rank and _is_first(kind):
        _logger.warning(
            f"{what} on {device} are copied through host memory: "
            f"{_reason(kind, here.engine_name, here.world.communicator.capabilities.devices)}"
        )


def note_one_node(exchange: Exchange, communicators: Communicators) -> None:
    """Log that an exchange does not do what its name says on a single node."""
    ranks = communicators.all_ranks
    told = exchange.on_one_node and communicators.one_node and ranks.size > 1 and not ranks.rank
    if told and _is_first(exchange.spec):
        _logger.warning(f"exchange {exchange.spec} {exchange.on_one_node}")


def _is_first(subject: str) -> bool:
    here = context.current()
    said: set[str] = here.kept.setdefault(here.world, {}).setdefault(_is_first, set())
    is_first = subject not in said
    said.add(subject)
    return is_first


def _reason(kind: str, engine: str, devices: Container[str]) -> str:
    if kind in devices:
        return "they are on several devices of a rank; keep a rank's parameters on one"
    instead = "; use --engine nccl" if kind == "cuda" else ""
    return f"engine {engine} takes no {'GPU' if kind == 'cuda' else kind} memory{instead}"
