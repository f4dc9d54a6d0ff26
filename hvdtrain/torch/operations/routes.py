"""How PyTorch tensors reach the engine, directly or through host memory, and when (all local)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel, Submission
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import HOST, Mark, Place, Several, Streams
from hvdtrain.types import DType, ReduceOp

Submitted = TypeVar("Submitted", bound=Submission)

_DTYPES = {getattr(torch, dtype.value): dtype for dtype in DType}
_WIRE_TYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
}


def require_tensors(values: Iterable[object]) -> None:
    """Check that all values are tensors, not numbers, lists or numpy arrays."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"expected a torch tensor, got {type(value).__name__}: wrap it in torch.as_tensor()"
            )


def dtype_of(tensor: torch.Tensor) -> DType:
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise TypeError(f"tensors of {tensor.dtype} cannot be communicated") from None


def is_communicated(dtype: torch.dtype) -> bool:
    """Return whether a dtype has a counterpart in DType."""
    return dtype in _DTYPES


def as_buffer(tensor: torch.Tensor) -> Buffer:
    """Return a buffer over the memory of a contiguous tensor, which the buffer keeps alive."""
    dtype = dtype_of(tensor)
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad:  # the usual case
        return Buffer(tensor.data_ptr(), dtype, tensor.numel(), "cpu", tensor)
    return Buffer.of(tensor)


def from_buffer(buffer: Buffer) -> torch.Tensor:
    """Return the elements of a buffer as a 1-d tensor of its dtype over the same memory."""
    elements = buffer.elements()
    if isinstance(elements, torch.Tensor):
        return elements
    dtype = getattr(torch, buffer.dtype.value)
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(elements, dtype=dtype)


def require_dense(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise ValueError(
            "a sparse tensor cannot be communicated as it is: use sparse_allreduce_async(), or "
            "tensor.to_dense()"
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor holds its elements, contiguously and unmodified."""
    return (
        tensor.is_contiguous()
        and not tensor.is_neg()
        and not (tensor.dtype.is_complex and tensor.is_conj())  # the memory holds the conjugate
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has neither gaps nor overlaps in memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def wire_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors are reduced: float32 for half types, uint8 for bool."""
    return _WIRE_TYPES.get(dtype, dtype)


class Route:
    """Passes tensors to an engine that supports memory of their device."""

    def __init__(self, streams: Streams, halves: bool) -> None:
        self.streams = streams
        self._halves = halves

    def wire_type(self, dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
        """Return the dtype in which tensors of a dtype are reduced; for Adasum at least float32."""
        if self._halves and dtype.is_floating_point and op is not ReduceOp.ADASUM:
            return dtype
        return wire_type(dtype)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the engine can read and write a tensor in its own memory."""
        return is_plain(tensor)

    def reduces(self, tensor: torch.Tensor, op: ReduceOp) -> bool:
        """Return whether the engine can reduce a tensor in its own memory and dtype."""
        dtype = tensor.dtype
        return self.wire_type(dtype, op) is dtype and self.takes(tensor)

    def sent(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a contiguous tensor for the engine to read, the given one if possible."""
        if (dtype is None or dtype == tensor.dtype) and self.takes(tensor):
            return self.own(tensor)
        return self.copied(tensor, dtype)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the engine can read and write directly, detached."""
        self.streams.keep(tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    def copied(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a contiguous copy for the engine to read and write."""
        require_dense(tensor)
        layout = torch.contiguous_format
        copy = tensor.detach().to(dtype or tensor.dtype, copy=True, memory_format=layout)
        self.streams.keep(copy)
        return copy

    def returned(self, copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contents of a copy with the dtype and device of the original."""
        return copy.to(tensor.dtype)

    def write_back(self, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with the copy that was made from it."""
        with torch.no_grad():
            tensor.copy_(copy)

    def received(self, buffer: Buffer, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory that the operation allocated, as a 1-d tensor."""
        made = from_buffer(buffer)
        self.streams.hand_over(made)
        return made.to(tensor.dtype)


class StagingRoute(Route):
    """Copies a device's tensors through host memory, for an engine that supports no other."""

    def __init__(self, streams: Streams, pinned: bool) -> None:
        super().__init__(streams, halves=False)
        self._pinned = pinned

    def takes(self, tensor: torch.Tensor) -> bool:
        return False

    def copied(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        require_dense(tensor)
        host = torch.empty(
            tensor.shape, dtype=dtype or tensor.dtype, device="cpu", pin_memory=self._pinned
        )
        self.streams.fill(tensor.detach(), host)
        return host

    def returned(self, copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        result = torch.empty(copy.shape, dtype=tensor.dtype, device=tensor.device)
        self.streams.read(copy, result)
        return result

    def write_back(self, copy: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            self.streams.read(copy, tensor)

    def received(self, buffer: Buffer, tensor: torch.Tensor) -> torch.Tensor:
        return self.returned(from_buffer(buffer), tensor)


_HOST_ROUTE = Route(HOST, halves=False)


def route_of(channel: Channel, tensor: torch.Tensor) -> Route:
    """Return the route of a tensor to a channel's engine."""
    if tensor.is_cpu:
        return _HOST_ROUTE
    device = tensor.device
    kept = context.current().kept.setdefault(channel, {})
    route: Route | None = kept.get((Route, device))
    if route is None:
        route = kept[Route, device] = _make(channel, device)
    route.streams.refuse_capture("an operation on tensors")
    return route


def _make(channel: Channel, device: torch.device) -> Route:
    capabilities = channel.communicator.capabilities
    streams = streams_of(device, capabilities)
    if device.type in capabilities.devices:
        return Route(streams, capabilities.half_types)
    from hvdtrain.core.warnings_once import note_staging

    note_staging("tensors", str(device))
    return StagingRoute(streams, pinned=device.type == "cuda")


def order(submitted: Submitted, routes: Sequence[Route]) -> Submitted:
    """Make an operation wait for the work that the calling thread has enqueued on its devices."""
    found = [route.streams for route in routes if route.streams is not HOST]
    if found:
        streams = list(dict.fromkeys(found))
        submitted.after(streams[0] if len(streams) == 1 else Several(streams))
    return submitted


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


def page_lock(memory: Elements, channel: Channel) -> None:
    """Page-lock host memory of a channel, so that copies between it and a GPU are asynchronous.

    Where the system refuses, copies still work, but the host waits for each of them. The memory is
    unlocked before the channel is closed.
    """
    buffer = Buffer.of(memory)
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(buffer.pointer, buffer.nbytes, 0)) == 0:
        channel.before_closing(partial(runtime.cudaHostUnregister, buffer.pointer))
        return
    with suppress(RuntimeError):  # the next call of PyTorch would report this error as its own
        torch.zeros(1, device="cuda")
