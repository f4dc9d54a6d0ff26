"""The order of work on devices of PyTorch: CUDA's, and those that have streams and events alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar, cast

import torch

from hvdtrain.core import context
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import HOST, Event, Mark, Place, Streams

__all__ = ["CudaStreams", "Layer", "StagingStreams", "Stream", "TorchLayer", "streams_of"]

_Result = TypeVar("_Result")


class Stream(Hashable, Protocol):
    """What is used of torch.cuda.Stream."""

    def record_event(self) -> Event:
        """Return an event after all that has been put on the stream."""

    def wait_event(self, event: Event) -> None:
        """Have what is put on the stream from now on come after an event."""


class Layer(Protocol):
    """What is used of a device's module in torch, for one device."""

    def new_stream(self) -> Stream:
        """Return a stream that runs beside the others."""

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream on the device."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make a stream (and its device) the calling thread's current one for a while."""

    def capturing(self) -> bool:
        """Return whether the calling thread's current stream records a graph."""

    def record(self, memory: object, stream: Stream) -> None:
        """Keep the memory of a tensor from others until a stream is through with it."""


class _Module(Protocol):
    """What is used of torch.cuda (which is HIP's too), torch.xpu and others like them."""

    def current_stream(self, device: torch.device) -> Stream: ...

    def stream(self, stream: Stream) -> AbstractContextManager[object]: ...

    def device(self, device: torch.device) -> AbstractContextManager[object]: ...

    @property
    def Stream(self) -> Callable[[torch.device, int], Stream]: ...


class TorchLayer:
    """A device of PyTorch that has streams.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = cast("_Module", getattr(torch, device.type))

    def new_stream(self) -> Stream:
        """Return a stream from PyTorch's pool of those that go first.

        NCCL's process groups draw from the other one: two that order each other's work differently
        on different ranks must not share a stream.
        """
        return self._module.Stream(self._device, -1)

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream on the device."""
        return self._module.current_stream(self._device)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream (and its device) the calling thread's current one for a while."""
        # A thread of a channel begins on device 0. To go back there, a stream of another device
        # would set it, for which CUDA takes memory on it for this process; a device does not.
        with self._module.device(self._device), self._module.stream(stream):
            yield

    def capturing(self) -> bool:
        """Return whether the calling thread's current stream records a graph."""
        ask: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", _never)
        return ask()

    def record(self, memory: object, stream: Stream) -> None:
        """Tell the caching allocator."""
        tensor = cast("torch.Tensor", memory)
        tensor.record_stream(cast("torch.Stream", stream))


class _DeviceStreams(Streams):
    """What both kinds share: events on the streams of the program.

    Args:
        layer: of the device.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._side = layer.new_stream()
        self._readers: set[Stream] = set()

    def refuse_capture(self, what: str) -> None:
        if self._layer.capturing():
            raise UnsupportedError(
                f"{context.current().topology.title} {what} cannot be part of a CUDA graph, which "
                "is being captured: ranks agree on the host before each. Capture what lies between "
                "such operations, or call them outside of torch.cuda.graph()"
            )

    def place(self) -> Place:
        return self._layer.current_stream()

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        if places is None:
            return (self._layer.current_stream().record_event(),)
        return tuple(cast("Stream", place).record_event() for place in places)

    def read(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        current = self._layer.current_stream()
        self._readers.add(current)
        target.copy_(source, non_blocking=True)
        self._layer.record(target, current)

    def wait(self, mark: Mark) -> None:
        if mark:
            _follow(self._layer.current_stream(), mark)

    def done(self, mark: Mark) -> bool:
        return all(event.query() for event in mark or ())

    def settle(self, mark: Mark) -> None:
        for event in mark or ():
            event.synchronize()


class CudaStreams(_DeviceStreams):
    """Where the engine takes the device's memory: operations run on a side stream.

    The host never waits, but in `settle`. The side stream belongs to one channel: operations of
    two channels come in different orders on different ranks, and on one stream would wait for
    each other.
    """

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        self._follow_readers()
        target.copy_(source, non_blocking=True)

    def clear(self, target: torch.Tensor) -> None:  # type: ignore[override]
        self._follow_readers()
        target.zero_()

    def _follow_readers(self) -> None:
        current = self._layer.current_stream()
        _follow(current, self.mark(self._readers - {current}))

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        _follow(self._side, mark)
        with self._layer.on(self._side):
            result = work()
        return result, (self._side.record_event(),)

    def keep(self, memory: object) -> None:
        self._layer.record(memory, self._side)

    def hand_over(self, memory: object) -> None:
        self._layer.record(memory, self._layer.current_stream())


class StagingStreams(_DeviceStreams):
    """Where the engine takes host memory only: copies to pinned memory go on a side stream.

    Operations read that memory on the host, so the channel's thread waits for the copies.
    """

    def mark(self, places: Iterable[Place] | None = None) -> Mark:
        """Return what comes after these streams, and after all copies."""
        _follow(self._side, super().mark(places))
        return (self._side.record_event(),)

    def fill(self, source: torch.Tensor, target: torch.Tensor) -> None:  # type: ignore[override]
        _follow(self._side, super().mark(self._readers | {self._layer.current_stream()}))
        with self._layer.on(self._side):
            target.copy_(source, non_blocking=True)
        self._layer.record(source, self._side)

    def clear(self, target: torch.Tensor) -> None:  # type: ignore[override]
        self.settle(self.mark(self._readers))  # the host writes at once
        target.zero_()

    def run_after(self, mark: Mark, work: Callable[[], _Result]) -> tuple[_Result, Mark]:
        self.settle(mark)
        return work(), None


def streams_of(device: torch.device | str, capabilities: Capabilities) -> Streams:
    """Return the order of work between a device and one channel's operations.

    A device without streams does everything before a call returns, or before its memory is copied
    to the host.

    Args:
        device: where the program's tensors are.
        capabilities: of the channel's communicator.
    """
    device = torch.device(device)
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or not all(
        hasattr(module, name) for name in ("Stream", "current_stream", "stream", "device")
    ):
        return HOST
    layer = TorchLayer(device)
    return CudaStreams(layer) if device.type in capabilities.devices else StagingStreams(layer)


def _never() -> bool:
    return False


def _follow(stream: Stream, mark: Mark) -> None:
    for event in mark or ():
        stream.wait_event(event)
