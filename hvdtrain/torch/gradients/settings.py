"""How gradients of PyTorch parameters are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.torch.operations.compression import Compression, Compressor

__all__ = ["ParameterSettings"]


@dataclass(frozen=True)
class ParameterSettings(GradientSettings):
    """How gradients of PyTorch parameters are reduced.

    Attributes:
        passes: backward passes accumulated locally before a reduction.
        compressor: compressor of the user, which changes gradients before the reduction.
        sharded: whether the ranks of a node share the optimizer's work, if they can.

    Raises:
        ValueError: `passes` is less than 1; see GradientSettings for other errors.
    """

    passes: int = 1
    compressor: type[Compressor] = Compression.none
    sharded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {self.passes}")
