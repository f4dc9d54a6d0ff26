"""PyTorch tensors as buffers, and pinning one GPU per local rank."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.devices import DeviceWish, device_index, no_gpus
from hvdtrain.topology import Topology
from hvdtrain.types import DType

__all__ = [
    "as_buffer",
    "contiguous_copy",
    "dtype_of",
    "from_buffer",
    "is_plain",
    "pin_device",
    "require_dense",
    "require_tensors",
    "wire_type",
]

_DTYPES = {getattr(torch, dtype.value): dtype for dtype in DType}
_WIRE_TYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
}


def require_tensors(values: Iterable[object]) -> None:
    """Refuse what a script may take for a tensor: numbers, lists and arrays.

    Raises:
        TypeError: one of them is no tensor.
    """
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"expected a torch tensor, got {type(value).__name__}: wrap it in torch.as_tensor()"
            )


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the element type.

    Raises:
        TypeError: it has no counterpart here (quantised types, for example).
    """
    try:
        return _DTYPES[tensor.dtype]
    except KeyError:
        raise TypeError(f"tensors of {tensor.dtype} cannot be communicated") from None


def as_buffer(tensor: torch.Tensor) -> Buffer:
    """View a contiguous tensor; the buffer keeps its memory alive.

    Raises:
        ValueError: the tensor is not contiguous.
        TypeError: its elements have no counterpart here.
    """
    dtype = dtype_of(tensor)
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad:  # the usual one
        return Buffer(tensor.data_ptr(), dtype, tensor.numel(), "cpu", tensor)
    return Buffer.of(tensor)


def from_buffer(buffer: Buffer) -> torch.Tensor:
    """Return the elements of a buffer as a 1-d tensor over the same memory."""
    elements = buffer.elements()
    if isinstance(elements, torch.Tensor):
        return elements
    dtype = getattr(torch, buffer.dtype.value)
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(elements, dtype=dtype)


def require_dense(tensor: torch.Tensor) -> None:
    """Refuse a sparse tensor, which is no memory of elements.

    Raises:
        ValueError: it is sparse.
    """
    if tensor.layout != torch.strided:
        raise ValueError(
            "a sparse tensor cannot be communicated as it is: use sparse_allreduce_async(), or "
            "tensor.to_dense()"
        )


def contiguous_copy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous copy on the same device.

    Raises:
        ValueError: the tensor is sparse.
    """
    require_dense(tensor)
    return tensor.detach().to(
        dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie as they are, one after the other, in memory."""
    return (
        tensor.is_contiguous()
        and not tensor.is_conj()  # whose memory holds the conjugate
        and not tensor.is_neg()
    )


def wire_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors are reduced: half types in float32, bool in uint8."""
    return _WIRE_TYPES.get(dtype, dtype)


def pin_device(topology: Topology, wish: DeviceWish) -> torch.device:
    """Make one GPU per local rank the current device, or take the CPU (local).

    Args:
        topology: the place of this rank.
        wish: what it is to take.

    Raises:
        UsageError: cuda is asked for and not there, or there are fewer GPUs than local ranks.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish.kind == "cpu" or (wish.kind == "auto" and visible == 0):
        return torch.device("cpu")
    if visible == 0:
        raise no_gpus("torch", os.environ)
    device = torch.device("cuda", device_index(topology, visible, wish))
    torch.cuda.set_device(device)
    return device
