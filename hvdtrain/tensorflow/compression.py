"""Compressors of tensors, under the name of Horovod's module."""

import tensorflow as tf

from hvdtrain.core.compression import Compressions, Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

Compression = Compressions(
    __name__, tf.cast, lambda tensor: tensor.dtype.is_floating, tf.float16, tf.bfloat16
)
NoneCompressor = Compressor
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
