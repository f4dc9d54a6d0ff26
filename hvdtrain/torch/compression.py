"""Compression of tensors before they are reduced."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Leaves tensors as they are; subclasses change `compress` and `decompress`."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is reduced instead of the tensor, and what decompress() needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in its own type."""
        return tensor


class _Half(Compressor):
    _dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(cls._dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class _Float16(_Half):
    _dtype = torch.float16


class _BFloat16(_Half):
    _dtype = torch.bfloat16


class Compression:
    """The compressions there are: none, fp16, and bf16, which Horovod lacks.

    Half types are rounded once and added in float32.
    """

    none = Compressor
    fp16 = _Float16
    bf16 = _BFloat16
