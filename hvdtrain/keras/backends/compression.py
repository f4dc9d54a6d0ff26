"""Compressors, which round gradients before they are reduced."""

from __future__ import annotations

# Names of Compressor.dtype in exchanges.
HALF_TYPES = {None: "none", "float16": "fp16", "bfloat16": "bf16"}


class Compressor:
    """Does not change gradients."""

    dtype: str | None = None


NoneCompressor = Compressor  # its name in Horovod


class FP16Compressor(Compressor):
    """Rounds to float16."""

    dtype = "float16"


class BF16Compressor(Compressor):
    """Rounds to bfloat16."""

    dtype = "bfloat16"


class Compression:
    """The compressors, which round once and add in float32; Horovod lacks bf16."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
