"""Says once that what lies on a device is copied through host memory. Local."""

from __future__ import annotations

import logging
from collections.abc import Container

from hvdtrain.core import context

__all__ = ["note_staging"]

_logger = logging.getLogger("hvdtrain")


def note_staging(what: str, device: str) -> None:
    """Have rank 0 say it, unless it has said so of this type of device.

    Args:
        what: is copied: "gradients" or "tensors".
        device: where they are, as "cuda:0".
    """
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
