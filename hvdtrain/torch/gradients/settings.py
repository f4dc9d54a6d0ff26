"""How gradients of PyTorch parameters are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.torch.operations.compression import Compression, Compressor


@dataclass(frozen=True)
class ParameterSettings(GradientSettings):
    """How gradients of PyTorch parameters are reduced."""

    passes: int = 1
    compressor: type[Compressor] = Compression.none
    sharded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {self.passes}")
