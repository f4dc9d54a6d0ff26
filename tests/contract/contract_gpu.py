"""The contract's table in the memory of a GPU: operands are copied there, and results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator

_OPERATIONS = ("allreduce", "broadcast", "allgather", "alltoall", "reduce_scatter")


def on_gpu(communicator: Communicator) -> Communicator:
    """Return a communicator that does with copies on a GPU what is asked of it."""
    import torch

    torch.cuda.set_device(communicator.rank % torch.cuda.device_count())
    return cast(Communicator, _OnGpu(communicator))


class _OnGpu:
    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._communicator, name)
        return _staged(attribute) if name in _OPERATIONS else attribute

    def split(self, ranks: list[int]) -> Communicator | None:
        part = self._communicator.split(ranks)
        return None if part is None else on_gpu(part)


def _staged(operation: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        copies = [_copied(a) if isinstance(a, Buffer) else a for a in arguments]
        operation(*copies)
        for argument, copy in zip(arguments, copies, strict=True):
            if isinstance(argument, Buffer) and argument.count:
                _host(argument).copy_(copy.owner)

    return call


def _copied(buffer: Buffer) -> Buffer:
    if buffer.count == 0:
        return Buffer(0, buffer.dtype, 0, "cuda")
    memory = _host(buffer).cuda()
    return Buffer(memory.data_ptr(), buffer.dtype, buffer.count, "cuda", memory)


def _host(buffer: Buffer) -> Any:
    import torch

    return torch.frombuffer(buffer.array(), dtype=torch.uint8)
