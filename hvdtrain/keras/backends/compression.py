"""Compressors of values and gradients of Keras."""

import numpy as np

from hvdtrain.core.compression import Compressions

Compression = Compressions(
    __name__, np.ndarray.astype, lambda array: array.dtype.kind == "f", "float16", "bfloat16"
)
NoneCompressor = Compression.none
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
