"""Host memory that a GPU reads and writes by itself, while both sides go on. Local."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core.agreement.channel import Channel

__all__ = ["pin"]


def pin(memory: Elements, channel: Channel) -> None:
    """Lock memory of a channel in place, so that copies between it and a GPU run beside all else.

    Where the system refuses it, copies still work, and the host waits for each.

    Args:
        memory: in host memory, not empty.
        channel: whose engine has made it, and takes it back.
    """
    buffer = Buffer.of(memory)
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(buffer.pointer, buffer.nbytes, 0)) == 0:
        channel.before_closing(partial(runtime.cudaHostUnregister, buffer.pointer))
        return
    with suppress(RuntimeError):  # the next call of PyTorch would report that refusal as its own
        torch.zeros(1, device="cuda")
