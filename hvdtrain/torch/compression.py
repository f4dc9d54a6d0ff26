"""Compressors of tensors, under the name of Horovod's module."""

import torch

from hvdtrain.core.compression import Compressions, Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

Compression = Compressions(
    __name__, torch.Tensor.to, torch.is_floating_point, torch.float16, torch.bfloat16
)
NoneCompressor = Compressor
FP16Compressor, BF16Compressor = Compression.fp16, Compression.bf16
