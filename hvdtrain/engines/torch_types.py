"""What torch.distributed reduces, and buffers as the tensors that it takes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.types import DType, ReduceOp

__all__ = ["BOOL_OPS", "OPS", "WIDE", "bytes_of", "capabilities", "elements_of", "multiply"]

OPS = {
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
# Reduced in a wider type: halves would be rounded at every hop, and no backend takes the others.
WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

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
        # NCCL kernels of two communicators can wait for each other on one GPU.
        concurrent=not cuda,
    )


def elements_of(buffer: Buffer) -> torch.Tensor:
    """View a buffer as a 1-d tensor of its element type."""
    dtype: torch.dtype = getattr(torch, buffer.dtype.value)
    return bytes_of(buffer).view(dtype)


def bytes_of(buffer: Buffer) -> torch.Tensor:
    """View a buffer as a 1-d tensor of bytes."""
    if buffer.count == 0:
        return torch.empty(0, dtype=torch.uint8, device=buffer.device)
    if buffer.device == "cpu":
        return torch.frombuffer(buffer.array(), dtype=torch.uint8)
    return torch.as_tensor(_CudaArray(buffer), device=buffer.device)


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


class _CudaArray:
    """Memory on a GPU, described in the way that torch takes without copying it."""

    def __init__(self, buffer: Buffer) -> None:
        self.__cuda_array_interface__ = {
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (buffer.pointer, False),
            "version": 3,
        }
