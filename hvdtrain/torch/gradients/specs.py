"""What ranks must agree on about the parameters of PyTorch. Pure."""

from __future__ import annotations

import torch

from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.torch.tensors.buffers import dtype_of, wire_type
from hvdtrain.types import DType

__all__ = ["spec_of"]


def spec_of(name: str, parameter: torch.nn.Parameter, halves: bool) -> ParameterSpec:
    """Return what a plan needs to know of a parameter as it is now.

    Args:
        name: of the parameter.
        parameter: whose gradient is to be reduced.
        halves: the engine adds half types in float32 by itself.
    """
    # A gradient in the memory order of its parameter lets the optimizer run through both.
    dense = parameter if _fills_its_memory(parameter) else parameter.detach().contiguous()
    own = dtype_of(parameter)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        strides=tuple(dense.stride()),
        dtype=own if halves else DType(str(wire_type(parameter.dtype)).removeprefix("torch.")),
        kind=own.value,
        device=parameter.device.type,
    )


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True
