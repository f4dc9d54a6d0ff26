"""What differs between the backends that Keras runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

import keras

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.allocators import FindLibrary
from hvdtrain.core.arrays.fused import Layout, ReduceArrays, reduce_present
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.step_info import WeightSums
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable, Value
from hvdtrain.types import ReduceOp

F = TypeVar("F", bound=Callable[..., object])
Tensors: TypeAlias = Sequence[BackendTensor]
# Called with the values of tensors, when a step runs.
HostFunction: TypeAlias = Callable[[Sequence[HostArray]], Sequence[HostArray]]
HostQuestion: TypeAlias = Callable[[Sequence[HostArray]], bool]


class Backend:
    """Keras on a framework whose tensors have values at once; others override what differs."""

    allocator: FindLibrary | None = None  # finds the allocator of gradients

    def to_array(self, tensor: Any) -> HostArray:
        raise NotImplementedError

    def from_array(self, array: HostArray, like: Any) -> Any:
        raise NotImplementedError

    @collective
    def map_arrays(
        self, function: HostFunction, inputs: Tensors, results: Tensors, name: str
    ) -> list[BackendTensor]:
        """Call a function on arrays, in the order of the program, for tensors like `results`."""
        arrays = function(list(map(self.to_array, inputs)))
        return [self.from_array(a, like) for a, like in zip(arrays, results, strict=True)]

    @collective
    def exchange_if(
        self, due: HostQuestion, numbers: Tensors, exchange: HostFunction, values: Tensors
    ) -> list[BackendTensor]:
        """Exchange values if that is due, else copy nothing to the host (collective if due)."""
        if not due(list(map(self.to_array, numbers))):
            return list(values)
        return self.map_arrays(exchange, values, values, "exchange_of_weights")

    @collective
    def reduce(
        self,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        exchange: ReduceArrays,
        settings: GradientSettings,
        name: str,
        samples: BackendTensor | float | None,
    ) -> list[BackendTensor | None]:
        """Reduce gradients over the ranks."""
        own = [None if gradient is None else self.to_array(gradient) for gradient in gradients]
        weight = None if samples is None else float(samples)
        reduced = self.reduce_arrays(own, variables, exchange, name, weight, fixed=False)
        likes = [
            variable.value if gradient is None else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        pairs = zip(reduced, likes, strict=True)
        return [None if array is None else self.from_array(array, like) for array, like in pairs]

    @collective
    def reduce_arrays(
        self,
        arrays: Sequence[HostArray | None],
        variables: Sequence[KerasVariable],
        exchange: ReduceArrays,
        name: str,
        samples: float | None,
        fixed: bool,
    ) -> list[HostArray | None]:
        """Reduce gradients that are arrays; `fixed` says that none can be added to them."""

        def reduce_dense(given: Sequence[HostArray], layout: Layout) -> Sequence[HostArray]:
            return exchange(given, layout, None, samples)[0]

        def zeros(index: int) -> HostArray:
            return self.to_array(keras.ops.zeros(variables[index].shape, variables[index].dtype))

        paths = [variable.path for variable in variables]
        return reduce_present(arrays, paths, name, zeros, reduce_dense, fixed)

    def as_dense(self, gradients: Sequence[BackendTensor | None]) -> list[BackendTensor | None]:
        """Return gradients of which none is sparse."""
        return list(gradients)

    def size_like(self, gradient: BackendTensor, process_set: ProcessSet) -> BackendTensor | int:
        """Return the number of ranks, in a function that is traced as it is when it runs."""
        return process_set.size() or 1

    @collective
    def traced_allreduce(
        self, value: Value, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> BackendTensor | None:
        """Reduce a value of a function that is being traced (collective when it runs)."""
        return None

    def is_tracing(self) -> bool:
        """Return whether this function is called by one that is being traced (local)."""
        return False

    def wait_for_steps(self) -> None:
        """Wait until all steps that were started are done, if Python continues before."""
        return None

    def outside_traces(self) -> AbstractContextManager[object]:
        """Return a context in which variables have values, also while a function is traced."""
        return nullcontext()

    def after(self, tensors: Sequence[BackendTensor | None]) -> AbstractContextManager[object]:
        """Return a context whose operations run once these tensors have values."""
        return nullcontext()

    def weight_sums(self, variables: Sequence[KerasVariable]) -> WeightSums | None:
        """Return what ranks compare of variables in a step, if they have their values then."""
        return None

    def retrace(self, model: keras.Model) -> None:
        """Make a model trace its step again if dense gradients may become sparse."""
        return None

    def faster_steps(self, kind: type) -> dict[str, Any]:
        """Return methods with which a subclass of an optimizer's class steps faster, if any."""
        return {}

    def do_not_compile(self, function: F) -> F:
        """Keep the backend's compiler of user functions from rewriting a function."""
        return function
