"""The order of work on PyTorch devices that have streams and events like CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch

from hvdtrain.core import context
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import HOST, Mark, Place, Streams

_Result = TypeVar("_Result")


class _DeviceStreams(Streams):
    """What both subclasses share: events on the program's streams."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, getattr(torch, device.type)
        # Of high priority: NCCL's process groups use the other pool of PyTorch. Sharing a stream
        # with them could deadlock where ranks enqueue work in different orders.
        self._side: torch.Stream = self._module.Stream(device, -1)
        self._readers: set[torch.Stream] = set()

    @contextmanager
    def _on_side(self) -> Iterator[None]:
        """Return a context in which the side stream and its device are current in this thread."""
        # A channel's thread starts with device 0 current. When the context of a stream on another
        # device ends, it sets device 0 again, which makes CUDA allocate a context there; that of
        # a device does not.
        with self._module.device(self._device), self._module.stream(self._side):
            yield

    def refuse_capture(self, what: str) -> None:
        capturing: Callable[[], bool]
        capturing = getattr(self._module, "is_current_stream_capturing", bool)
        if capturing():
            raise UnsupportedError(
                f"{context.current().topology.title} {what} cannot be part of a CUDA graph, which "
                "is being captured: ranks agree on the host before each. Capture what lies between "
                "such operations, or call them outside of torch.cuda.graph()"
            )

    def place(self) -> torch.Stream:
        current: torch.Stream = self._module.current_stream(self._device)
        return current

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        streams = cast("Iterable[torch.Stream]", [self.place()] if places is None else places)
        return tuple(stream.record_event() for stream in streams)

    def read(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        current = self.place()
        self._readers.add(current)
        target.copy_(source, non_blocking=True)
        target.record_stream(current)

    def wait(self, mark: Mark) -> None:
        if mark:
            _follow(self.place(), mark)

    def done(self, mark: Mark) -> bool:
        return all(event.query() for event in mark or ())

    def settle(self, mark: Mark) -> None:
        for event in mark or ():
            event.synchronize()


class CudaStreams(_DeviceStreams):
    """For an engine that supports the device's memory: operations run on a side stream.

    The host waits in `settle` only. The side stream belongs to one channel: operations of two
    channels run in different orders on different ranks, and would deadlock on one stream.
    """

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        self._follow_readers()
        target.copy_(source, non_blocking=True)

    def clear(self, target: torch.Tensor) -> None:  # type: ignore[override]
        self._follow_readers()
        target.zero_()

    def _follow_readers(self) -> None:
        current = self.place()
        _follow(current, self.mark(self._readers - {current}))

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        _follow(self._side, mark)
        with self._on_side():
            result = work()
        return result, (self._side.record_event(),)

    def keep(self, memory: object) -> None:
        _keep(memory, self._side)

    def hand_over(self, memory: object) -> None:
        _keep(memory, self.place())


class StagingStreams(_DeviceStreams):
    """For an engine that supports host memory only: copies run on a side stream.

    Operations read page-locked memory on the host, so the channel's thread waits for the copies.
    """

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        """Return a mark after the work on these streams and after all copies."""
        _follow(self._side, super().mark(places))
        return (self._side.record_event(),)

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        _follow(self._side, super().mark(self._readers | {self.place()}))
        with self._on_side():
            target.copy_(source, non_blocking=True)
        source.record_stream(self._side)

    def clear(self, target: torch.Tensor) -> None:  # type: ignore[override]
        self.settle(self.mark(self._readers))  # the host writes at once
        target.zero_()

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        self.settle(mark)
        return work(), None


def streams_of(device: torch.device | str, capabilities: Capabilities) -> Streams:
    """Return the order of work between a device and one channel's operations.

    A device without streams completes work before a call returns, or before its memory is copied
    to the host.
    """
    device = torch.device(device)
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or not all(
        hasattr(module, name) for name in ("Stream", "current_stream", "stream", "device")
    ):
        return HOST
    return (CudaStreams if device.type in capabilities.devices else StagingStreams)(device)


def _keep(memory: object, stream: torch.Stream) -> None:
    """Record the use of a tensor's memory with the caching allocator."""
    cast("torch.Tensor", memory).record_stream(stream)


def _follow(stream: torch.Stream, mark: Mark) -> None:
    for event in mark or ():
        stream.wait_event(cast("torch.Event", event))
