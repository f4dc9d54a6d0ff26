"""The order of work on PyTorch devices that have streams and events like CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar, cast

import torch

from hvdtrain.core import context
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import HOST, Event, Mark, Place, Streams

_Result = TypeVar("_Result")


class Stream(Hashable, Protocol):
    """The part of torch.cuda.Stream that is used here."""

    def record_event(self) -> Event:
        """Return an event after all work enqueued so far."""

    def wait_event(self, event: Event) -> None:
        """Make work that is enqueued from now on wait for an event."""


class DeviceApi(Protocol):
    """The operations on one device that this module needs."""

    def new_stream(self) -> Stream:
        """Return a stream that runs concurrently with the others."""

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream on the device."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which a stream and its device are current in this thread."""

    def capturing(self) -> bool:
        """Return whether the calling thread's current stream is capturing a graph."""

    def record(self, memory: object, stream: Stream) -> None:
        """Keep a tensor's memory from being reused until a stream has finished its work so far."""


class _Module(Protocol):
    """The part of torch.cuda (also for HIP), torch.xpu and similar modules that is used here."""

    def current_stream(self, device: torch.device) -> Stream: ...

    def stream(self, stream: Stream) -> AbstractContextManager[object]: ...

    def device(self, device: torch.device) -> AbstractContextManager[object]: ...

    @property
    def Stream(self) -> Callable[[torch.device, int], Stream]: ...


class TorchDevice:
    """A PyTorch device that has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = cast("_Module", getattr(torch, device.type))

    def new_stream(self) -> Stream:
        """Return a stream from PyTorch's pool of high-priority streams.

        NCCL's process groups use the other pool. Sharing a stream with them could deadlock where
        ranks enqueue work in different orders.
        """
        return self._module.Stream(self._device, -1)

    def current_stream(self) -> Stream:
        return self._module.current_stream(self._device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        # A channel's thread starts with device 0 current. When the context of a stream on another
        # device ends, it sets device 0 again, which makes CUDA allocate a context there; that of
        # a device does not.
        with self._module.device(self._device), self._module.stream(stream):
            yield

    def capturing(self) -> bool:
        ask: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", _never)
        return ask()

    def record(self, memory: object, stream: Stream) -> None:
        """Record the use of a tensor's memory with the caching allocator."""
        tensor = cast("torch.Tensor", memory)
        tensor.record_stream(cast("torch.Stream", stream))


class _DeviceStreams(Streams):
    """What both subclasses share: events on the program's streams."""

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._side = api.new_stream()
        self._readers: set[Stream] = set()

    def refuse_capture(self, what: str) -> None:
        if self._api.capturing():
            raise UnsupportedError(
                f"{context.current().topology.title} {what} cannot be part of a CUDA graph, which "
                "is being captured: ranks agree on the host before each. Capture what lies between "
                "such operations, or call them outside of torch.cuda.graph()"
            )

    def place(self) -> Place:
        return self._api.current_stream()

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        if places is None:
            return (self._api.current_stream().record_event(),)
        return tuple(cast("Stream", place).record_event() for place in places)

    def read(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        current = self._api.current_stream()
        self._readers.add(current)
        target.copy_(source, non_blocking=True)
        self._api.record(target, current)

    def wait(self, mark: Mark) -> None:
        if mark:
            _follow(self._api.current_stream(), mark)

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
        current = self._api.current_stream()
        _follow(current, self.mark(self._readers - {current}))

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        _follow(self._side, mark)
        with self._api.on(self._side):
            result = work()
        return result, (self._side.record_event(),)

    def keep(self, memory: object) -> None:
        self._api.record(memory, self._side)

    def hand_over(self, memory: object) -> None:
        self._api.record(memory, self._api.current_stream())


class StagingStreams(_DeviceStreams):
    """For an engine that supports host memory only: copies run on a side stream.

    Operations read page-locked memory on the host, so the channel's thread waits for the copies.
    """

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        """Return a mark after the work on these streams and after all copies."""
        _follow(self._side, super().mark(places))
        return (self._side.record_event(),)

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        _follow(self._side, super().mark(self._readers | {self._api.current_stream()}))
        with self._api.on(self._side):
            target.copy_(source, non_blocking=True)
        self._api.record(source, self._side)

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
    api = TorchDevice(device)
    return CudaStreams(api) if device.type in capabilities.devices else StagingStreams(api)


def _never() -> bool:
    return False


def _follow(stream: Stream, mark: Mark) -> None:
    for event in mark or ():
        stream.wait_event(event)
