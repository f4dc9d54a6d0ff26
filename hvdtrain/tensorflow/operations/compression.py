"""Compressors, which round tensors before they are reduced."""

from __future__ import annotations

import tensorflow as tf

from hvdtrain.core.horovod_api import Compressor


class _Half(Compressor):
    _dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, cls._dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType | None) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


NoneCompressor = Compressor  # its name in Horovod


class FP16Compressor(_Half):
    """Rounds to float16."""

    _dtype = tf.float16


class BF16Compressor(_Half):
    """Rounds to bfloat16."""

    _dtype = tf.bfloat16


class Compression:
    """The compressors, which round once and add in float32; Horovod lacks bf16."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compression_name(compression: type[Compressor]) -> str:
    """Return "none", "fp16" or "bf16" for a compressor of Compression, else "own"."""
    names = {getattr(Compression, name): name for name in ("none", "fp16", "bf16")}
    return names.get(compression, "own")
