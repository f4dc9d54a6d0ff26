"""Compressors, under the name of Horovod's module."""

from hvdtrain.core.horovod_api import Compressor
from hvdtrain.tensorflow.operations.compression import (
    BF16Compressor,
    Compression,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
