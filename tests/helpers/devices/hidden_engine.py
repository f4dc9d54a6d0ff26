"""An engine that takes memory of the tests' device: gloo moves the bytes that lie behind it.

    make_known()                              # in a worker, before init()
    HVDTRAIN_ENGINE=hidden                    # in its environment

Everything that the engine is given for the device is of the device; small integers of the core's
own are host memory, as for nccl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from hidden_device import install
from hidden_memory import DEVICE, elements_behind

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.config import Config
from hvdtrain.engines import ENGINES
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.engines.torch_distributed.engine import open_gloo

ENGINE = "hidden"


def make_known() -> None:
    """Install the device, and let hvdtrain find the engine by its name, in this process."""
    install()
    ENGINES[ENGINE] = f"{__name__}:open_hidden"


def open_hidden(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    world = open_gloo(config, environ)
    return replace(world, engine=ENGINE, communicator=HiddenCommunicator(world.communicator))


def _forwarded(name: str) -> Any:
    def call(self: "HiddenCommunicator", *arguments: Any, **named: Any) -> Any:
        behind = [_behind(each) if isinstance(each, Buffer) else each for each in arguments]
        return getattr(self._inner, name)(*behind, **named)

    return call


class HiddenCommunicator(Communicator):
    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        devices = inner.capabilities.devices | {DEVICE}
        self.capabilities = replace(inner.capabilities, devices=devices)

    start_max, allreduce, broadcast, allgather = map(
        _forwarded, ("start_max", "allreduce", "broadcast", "allgather")
    )
    alltoall, reduce_scatter, barrier, close, abort = map(
        _forwarded, ("alltoall", "reduce_scatter", "barrier", "close", "abort")
    )

    def split(self, ranks: Sequence[int]) -> "HiddenCommunicator | None":
        part = self._inner.split(ranks)
        return None if part is None else HiddenCommunicator(part)

    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        self._require(device)
        if device == "cpu":
            return self._inner.empty(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class _OfTensor(Buffer):
    """A buffer of which gloo is to take the tensor."""

    def array(self) -> NoReturn:
        raise AssertionError(f"a numpy view of {self}, which stands for memory on a device")


def _behind(buffer: Buffer) -> Buffer:
    """Return what lies behind a buffer on the device; one in host memory as it is."""
    if buffer.device == "cpu":
        return buffer
    elements = buffer.elements()
    assert isinstance(elements, torch.Tensor), buffer
    assert elements.device == torch.device(buffer.device), buffer
    assert elements.numel() == buffer.count, buffer
    # torch says 0 for one without elements.
    assert not buffer.count or elements.data_ptr() == buffer.pointer, buffer
    return _OfTensor.of(elements_behind(elements))
