"""Keras on PyTorch, whose tensors have values when they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from hvdtrain.arrays import HostArray
from hvdtrain.core.gradients.weight_check import WeightSums
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.keras.backends.reduction import F, GradientReduction, ReductionBackend
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable, Value
from hvdtrain.torch.tensors.parts import weight_sums
from hvdtrain.types import ReduceOp

_HALF_TYPES = (torch.float16, torch.bfloat16)


class TorchBackend(ReductionBackend):
    """PyTorch; see `ReductionBackend`."""

    def reduce(
        self,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        reduction: GradientReduction,
        samples: BackendTensor | float | None,
    ) -> list[BackendTensor | None]:
        tensors = cast(Sequence["torch.Tensor | None"], gradients)
        arrays = [None if tensor is None else _to_array(tensor) for tensor in tensors]
        weight = None if samples is None else float(samples)

        def like(index: int) -> torch.Tensor:
            gradient, variable = tensors[index], cast(Any, variables[index])
            return variable.value if gradient is None else gradient

        def zeros(index: int) -> HostArray:
            return _to_array(torch.zeros_like(like(index)))

        return [
            None if array is None else torch.from_numpy(array).to(like(i).device, like(i).dtype)
            for i, array in enumerate(reduction.reduce_arrays(arrays, variables, weight, zeros))
        ]

    def exchange_if(
        self,
        due: Callable[[list[HostArray]], bool],
        numbers: Sequence[BackendTensor],
        exchange: Callable[[list[HostArray]], list[HostArray]],
        weights: Sequence[BackendTensor],
    ) -> list[BackendTensor]:
        if not due([_to_array(number) for number in cast(Sequence[torch.Tensor], numbers)]):
            return list(weights)
        tensors = cast(Sequence[torch.Tensor], weights)
        return [
            torch.from_numpy(array).to(tensor.device, tensor.dtype)
            for array, tensor in zip(exchange(list(map(_to_array, tensors))), tensors, strict=True)
        ]

    def map_arrays(
        self,
        function: Callable[[Sequence[HostArray]], Sequence[HostArray]],
        inputs: Sequence[BackendTensor],
        results: Sequence[BackendTensor],
        name: str,
    ) -> list[BackendTensor]:
        arrays = function([_to_array(tensor) for tensor in cast(Sequence[torch.Tensor], inputs)])
        kinds = cast(Sequence[torch.Tensor], results)
        return [
            torch.from_numpy(array).to(tensor.device, tensor.dtype)
            for array, tensor in zip(arrays, kinds, strict=True)
        ]

    def size_like(self, gradient: BackendTensor, process_set: ProcessSet) -> int:
        return process_set.size() or 1

    def traced_allreduce(
        self, value: Value, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> BackendTensor | None:
        return None  # nothing is traced

    def is_tracing(self) -> bool:
        return False

    def weight_sums(self, variables: Sequence[KerasVariable]) -> WeightSums:
        return weight_sums((each.path, cast(Any, each).value) for each in variables)

    def do_not_compile(self, function: F) -> F:
        # A user may compile the step with torch.compile.
        disabled: F = torch.compiler.disable(function)
        return disabled


def _to_array(gradient: torch.Tensor) -> HostArray:
    """Return a gradient, as float32 if it is of a half type."""
    tensor = gradient.detach().cpu()
    # numpy has no bfloat16, and half types are added in float32.
    array: HostArray = (tensor.float() if tensor.dtype in _HALF_TYPES else tensor).numpy()
    return array
