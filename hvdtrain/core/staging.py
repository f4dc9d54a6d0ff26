"""A warning, logged once, that tensors on a device are copied through host memory."""

from __future__ import annotations

import logging
from collections.abc import Container

from hvdtrain.core import context

_logger = logging.getLogger("hvdtrain")


def note_staging(what: str, device: str) -> None:
    """Log on rank 0, once for each type of device, that data is copied through the host."""
    here = context.current()
    said: set[str] = here.kept.setdefault(here.world, {}).setdefault(note_staging, set())
    kind = device.partition(":")[0]
    if here.topology.rank or kind in said:
        return
    said.add(kind)
    _logger.warning(
        f"{what} on {device} are copied through host memory: "
        f"{_reason(kind, here.engine_name, here.world.communicator.capabilities.devices)}"
    )


def _reason(kind: str, engine: str, devices: Container[str]) -> str:
    if kind in devices:
        return "they are on several devices of a rank; keep a rank's parameters on one"
    instead = "; use --engine nccl" if kind == "cuda" else ""
    return f"engine {engine} takes no {'GPU' if kind == 'cuda' else kind} memory{instead}"
