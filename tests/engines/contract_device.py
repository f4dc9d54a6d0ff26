"""The contract's table in the memory of a device: operands are copied there, and results back."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator

_OPERATIONS = ("allreduce", "broadcast", "allgather", "alltoall", "reduce_scatter")


def on_device(communicator: Communicator, kind: str) -> Communicator:
    """Return a communicator that does with copies on a device what is asked of it."""
    import torch

    if kind == "cuda":
        torch.cuda.set_device(communicator.rank % torch.cuda.device_count())
    return cast(Communicator, _OnDevice(communicator, kind))


class _OnDevice:
    def __init__(self, communicator: Communicator, kind: str) -> None:
        self._communicator, self._kind = communicator, kind

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._communicator, name)
        return _staged(attribute, self._kind) if name in _OPERATIONS else attribute

    def split(self, ranks: list[int]) -> Communicator | None:
        part = self._communicator.split(ranks)
        return None if part is None else on_device(part, self._kind)


def _staged(operation: Callable[..., None], kind: str) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        copies = [_copied(a, kind) if isinstance(a, Buffer) else a for a in arguments]
        operation(*copies)
        for argument, copy in zip(arguments, copies, strict=True):
            if isinstance(argument, Buffer) and argument.count:
                with nullcontext() if kind == "cuda" else _allowed():
                    _host(argument).copy_(copy.owner)

    return call


def _allowed() -> AbstractContextManager[None]:
    from hidden_device import allowed

    return allowed()


def _copied(buffer: Buffer, kind: str) -> Buffer:
    import torch

    if buffer.count == 0:
        return Buffer.of(torch.empty(0, dtype=_type(buffer), device=kind))
    return Buffer.of(_host(buffer).to(kind))


def _host(buffer: Buffer) -> Any:
    import torch

    return torch.frombuffer(buffer.array(), dtype=_type(buffer))


def _type(buffer: Buffer) -> Any:
    import torch

    return getattr(torch, buffer.dtype.value)
