"""Keras on PyTorch, whose tensors have values when they are reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.arrays import HostArray
from hvdtrain.core.gradients.step_info import WeightSums
from hvdtrain.keras.backends.backend import Backend, F
from hvdtrain.keras.backends.types import KerasVariable
from hvdtrain.torch.operations.parts import weight_sums

_HALF_TYPES = (torch.float16, torch.bfloat16)


class TorchBackend(Backend):
    def to_array(self, tensor: torch.Tensor) -> HostArray:
        host = tensor.detach().cpu()
        # numpy has no bfloat16, and half types are added in float32.
        array: HostArray = (host.float() if host.dtype in _HALF_TYPES else host).numpy()
        return array

    def from_array(self, array: HostArray, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(array).to(like.device, like.dtype)

    def weight_sums(self, variables: Sequence[KerasVariable]) -> WeightSums:
        return weight_sums((each.path, each.value) for each in variables)

    def do_not_compile(self, function: F) -> F:
        # A user may compile the step with torch.compile.
        disabled: F = torch.compiler.disable(function)
        return disabled
