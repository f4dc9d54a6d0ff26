"""How PyTorch tensors reach the engine: directly, or through host memory (all local)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel, Submission
from hvdtrain.core.warnings_once import note_staging
from hvdtrain.streams import HOST, Several, Streams
from hvdtrain.torch.tensors.streams import streams_of
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
    note_staging("tensors", str(device))
    return StagingRoute(streams, pinned=device.type == "cuda")


def order(submitted: Submitted, routes: Sequence[Route]) -> Submitted:
    """Make an operation wait for the work that the calling thread has enqueued on its devices."""
    found = [route.streams for route in routes if route.streams is not HOST]
    if found:
        streams = list(dict.fromkeys(found))
        submitted.after(streams[0] if len(streams) == 1 else Several(streams))
    return submitted
