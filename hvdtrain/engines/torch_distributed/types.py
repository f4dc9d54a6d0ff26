"""What torch.distributed reduces, and buffers as the tensors that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.types import DType, ReduceOp

__all__ = [
    "BOOL_OPS",
    "GLOO_WIDE",
    "NCCL_WIDE",
    "OPS",
    "Widths",
    "bytes_of",
    "capabilities",
    "multiply",
    "tensor_of",
]

# For the types that a library does not add, or not well, those in which it does.
Widths = Mapping[torch.dtype, torch.dtype]

OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
# Added as bytes, two True would make a 2.
BOOL_OPS = OPS | {
    ReduceOp.SUM: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.MIN,
}
# Neither library has these; and gloo would round halves at every hop, at a CPU's pace.
NCCL_WIDE: Widths = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
GLOO_WIDE: Widths = {**NCCL_WIDE, torch.float16: torch.float32, torch.bfloat16: torch.float32}

_COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
_REAL = frozenset(DType) - _COMPLEX

_REDUCES = {
    ReduceOp.SUM: _REAL | _COMPLEX,
    ReduceOp.MIN: _REAL,
    ReduceOp.MAX: _REAL,
    ReduceOp.PRODUCT: _REAL,
}


def capabilities(cuda: bool) -> Capabilities:
    """Return what gloo takes, or (cuda) NCCL and gloo side by side."""
    return Capabilities(
        reduces=_REDUCES,
        moves=frozenset(DType),
        devices=frozenset({"cpu", "cuda"} if cuda else {"cpu"}),
        # Of communicators side by side NCCL asks that their kernels can run on the GPU at once, or
        # are started in one order on all ranks. A kernel of NCCL's takes a few of a GPU's many
        # processors, and each communicator of torch's has a stream of its own; only a program with
        # dozens of busy channels, or with CUDA_DEVICE_MAX_CONNECTIONS=1, could see them wait for
        # each other.
        concurrent=True,
        halves=cuda,
        rounds_once=not cuda,
    )


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """Return the elements as a 1-d tensor of their type over the same memory."""
    elements = buffer.elements()
    if isinstance(elements, torch.Tensor):
        return elements
    # Memory of numpy: agreement, objects, and the frameworks that have arrays.
    dtype: torch.dtype = getattr(torch, buffer.dtype.value)
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(elements, dtype=dtype)


def bytes_of(buffer: Buffer) -> torch.Tensor:
    """View a buffer as a 1-d tensor of bytes."""
    return tensor_of(buffer).view(torch.uint8)


def multiply(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in float64 and truncated.

    Raises:
        ValueError: the elements are bool.
    """
    if factor == 1.0:
        return
    if tensor.dtype == torch.bool:
        raise ValueError(f"a factor of {factor} cannot be applied to bool")
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.to(torch.float64) * factor).trunc_())
