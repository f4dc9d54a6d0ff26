"""Compression of tensors before they are reduced."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.core.horovod_api import Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Half(Compressor):
    _dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, cls._dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


NoneCompressor = Compressor  # Horovod's name for it


class FP16Compressor(_Half):
    """Rounds to float16."""

    _dtype = tf.float16


class BF16Compressor(_Half):
    """Rounds to bfloat16."""

    _dtype = tf.bfloat16


class Compression:
    """The compressions there are: none, fp16, and bf16, which Horovod lacks.

    Half types are rounded once and added in float32.
    """

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
