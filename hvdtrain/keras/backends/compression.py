"""Compression of gradients before they are reduced."""

from __future__ import annotations

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Leaves gradients as they are; subclasses name the type that they are rounded to."""

    dtype: str | None = None


NoneCompressor = Compressor  # Horovod's name for it


class FP16Compressor(Compressor):
    """Rounds to float16."""

    dtype = "float16"


class BF16Compressor(Compressor):
    """Rounds to bfloat16."""

    dtype = "bfloat16"


class Compression:
    """The compressions there are: none, fp16, and bf16, which Horovod lacks.

    Half types are rounded once and added in float32.
    """

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
