"""Types and reductions of torch.distributed, and buffers as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.types import DType, ReduceOp

# Wider dtypes in which dtypes are reduced that a library does not support, or not well.
Widths = Mapping[torch.dtype, torch.dtype]

OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
# As bytes, the sum of two True would be 2.
BOOL_OPS = OPS | {
    ReduceOp.SUM: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.MIN,
}
# Neither library supports these, and gloo would round half types at every hop, slowly.
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
    """Return the capabilities of gloo, or with `cuda` of NCCL and gloo together."""
    return Capabilities(
        reduces=_REDUCES,
        moves=frozenset(DType),
        devices=frozenset({"cpu", "cuda"} if cuda else {"cpu"}),
        # NCCL requires that the kernels of concurrent communicators can run on the GPU at once, or
        # are launched in the same order on all ranks. A kernel uses a few of a GPU's many
        # multiprocessors, and each communicator has its own stream; only a program with dozens of
        # busy channels, or with CUDA_DEVICE_MAX_CONNECTIONS=1, could deadlock.
        concurrent=True,
        half_types=cuda,
        rounds_once=not cuda,
    )


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """Return the elements as a 1-d tensor of their dtype over the same memory."""
    elements = buffer.elements()
    if isinstance(elements, torch.Tensor):
        return elements
    # numpy's memory: agreement, objects, and frameworks that use arrays.
    dtype: torch.dtype = getattr(torch, buffer.dtype.value)
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(elements, dtype=dtype)


def bytes_of(buffer: Buffer) -> torch.Tensor:
    """View a buffer as a 1-d uint8 tensor."""
    return tensor_of(buffer).view(torch.uint8)


def multiply(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied in float64 and truncated."""
    if factor == 1.0:
        return
    if tensor.dtype == torch.bool:
        raise ValueError(f"a factor of {factor} cannot be applied to bool")
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.to(torch.float64) * factor).trunc_())
