"""Compression of tensors before they are reduced."""

from __future__ import annotations

import torch

from hvdtrain.core.horovod_api import Compressor


class _HalfCompressor(Compressor):
    _dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.to(cls._dtype) if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return tensor.to(ctx)


NoneCompressor = Compressor  # Horovod's name for it


class FP16Compressor(_HalfCompressor):
    """Rounds floating-point tensors to float16."""

    _dtype = torch.float16


class BF16Compressor(_HalfCompressor):
    """Rounds floating-point tensors to bfloat16."""

    _dtype = torch.bfloat16


class Compression:
    """The compressors, which round once and add in float32; Horovod lacks bf16."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compression_name(compression: type[Compressor]) -> str:
    """Return "none", "fp16" or "bf16" for a compressor of Compression, else "own"."""
    names = {getattr(Compression, name): name for name in ("none", "fp16", "bf16")}
    return names.get(compression, "own")
