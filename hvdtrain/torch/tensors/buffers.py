"""PyTorch tensors as buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType

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
    """Return the element type of a tensor."""
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
    """Check that a tensor is not sparse."""
    if tensor.layout != torch.strided:
        raise ValueError(
            "a sparse tensor cannot be communicated as it is: use sparse_allreduce_async(), or "
            "tensor.to_dense()"
        )


def contiguous_copy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous copy on the same device."""
    require_dense(tensor)
    return tensor.detach().to(
        dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor holds its elements, contiguously and unmodified."""
    return (
        tensor.is_contiguous()
        and not tensor.is_neg()
        and not (tensor.dtype.is_complex and tensor.is_conj())  # the memory holds the conjugate
    )


def wire_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors are reduced: float32 for half types, uint8 for bool."""
    return _WIRE_TYPES.get(dtype, dtype)
