"""The reduction of an optimizer's gradients, and what it needs of Keras's backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import keras

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import sample_weights
from hvdtrain.core.allocators import FindLibrary
from hvdtrain.core.arguments import GradientSettings
from hvdtrain.core.arrays.fused import exchange_fused, is_overwritten
from hvdtrain.core.arrays.layouts import Layout, reduce_present
from hvdtrain.core.exchanges.state import SavedExchange, load_exchange, save_exchange
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.core.gradients.weight_check import WeightSums
from hvdtrain.core.process_set import ProcessSet, stays_alone
from hvdtrain.keras.backends.sharding import ArrayBackend, KerasSharedUpdate
from hvdtrain.keras.backends.types import BackendTensor, KerasModel, KerasVariable, Value
from hvdtrain.keras.backends.weights import WeightBackend, WeightExchange
from hvdtrain.types import ReduceOp

# Returns the weight of this rank in a step.
Weigh: TypeAlias = Callable[[], BackendTensor | float | None]
# What a program sets as sample_weight; a function takes x, y and sample_weight of a batch.
SampleWeight: TypeAlias = (
    BackendTensor | float | Callable[[Any, Any, Any], BackendTensor | float] | None
)

F = TypeVar("F", bound=Callable[..., object])


class ReductionBackend(WeightBackend, ArrayBackend, Protocol):
    """What differs between Keras's backends."""

    allocator: FindLibrary | None = None  # finds the allocator of gradients

    @collective
    def reduce(
        self,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        reduction: GradientReduction,
        samples: BackendTensor | float | None,
    ) -> list[BackendTensor | None]:
        """Reduce gradients over the ranks."""

    def as_dense(self, gradients: Sequence[BackendTensor | None]) -> list[BackendTensor | None]:
        """Return gradients of which none is sparse."""
        return list(gradients)

    def size_like(self, gradient: BackendTensor, process_set: ProcessSet) -> BackendTensor | int:
        """Return the number of ranks, in a function that is traced as it is when it runs."""

    @collective
    def traced_allreduce(
        self, value: Value, op: ReduceOp, name: str | None, prescale: float, postscale: float
    ) -> BackendTensor | None:
        """Reduce a value of a function that is being traced (collective when it runs)."""

    def is_tracing(self) -> bool:
        """Return whether this function is called by one that is being traced."""

    def weight_sums(self, variables: Sequence[KerasVariable]) -> WeightSums | None:
        """Return what ranks compare of variables in a step, if they have their values then."""
        return None

    def retrace(self, model: KerasModel) -> None:
        """Make a model trace its step again if dense gradients may become sparse."""
        return None

    def do_not_compile(self, function: F) -> F:
        """Keep the backend's compiler of user functions from rewriting a function."""
        return function


class GradientReduction:
    """Reduces the gradients of an optimizer."""

    def __init__(
        self,
        settings: GradientSettings,
        name: str,
        backend: ReductionBackend,
        factor: float = 1.0,
        scale_local: bool = True,
        sharded: bool = False,
    ) -> None:
        self.settings, self.name, self._backend = settings, name, backend
        self._factor, self._scale_local = factor, scale_local
        self._local: dict[int, KerasVariable] = {}
        self._weigh: Weigh | None = None
        self._told: SampleWeight = None
        self._told_in_trace = False
        self.uneven = False
        self._steps = 0
        self.variables: Sequence[KerasVariable] = ()
        sample_weights.register(self)
        self.weights: WeightExchange | None = None
        if settings.weights:
            self.weights = WeightExchange(settings, name, backend, scale_local)
        self.sharded = sharded
        shared = KerasSharedUpdate(settings, name, backend) if sharded else None
        self.shared = shared if shared is not None and shared.active else None

    @property
    def steps(self) -> int:
        return self._steps if self.weights is None else self.weights.counter.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        if self.weights is None:
            self._steps = steps
        else:
            self.weights.counter.steps = steps

    @property
    def has_local(self) -> bool:
        """Whether gradients of some variables are not reduced."""
        return bool(self._local)

    def add_local(self, variable: KerasVariable) -> None:
        """Do not reduce the gradient of a variable."""
        if self.shared is not None:
            raise ValueError("sharded=True: all gradients are reduced, and none is local")
        if self.weights is not None and self.weights.inner_state.settles:
            raise ValueError(
                f"exchange {self.settings.make_exchange().spec!r} averages or resets the state of "
                "all variables, and cannot leave one out: give state=keep"
            )
        self._local[id(variable)] = variable  # kept, so that no other object gets its id

    @property
    def sample_weight(self) -> SampleWeight:
        """What the program says of this rank's weight in the next steps; None for nothing."""
        return self._told

    @sample_weight.setter
    def sample_weight(self, weight: SampleWeight) -> None:
        self._told, self._told_in_trace = weight, self._backend.is_tracing()

    def has(self, parameters: Set[int]) -> bool | None:
        """Return whether it reduces the gradient of one of these; see sample_weights."""
        if callable(self._told):  # for its own fit only
            return False
        own = set(map(id, self.variables))
        if not own or not parameters:  # it may learn them only when gradients are applied
            return None if self._weigh is None else True
        return not own.isdisjoint(parameters)

    @property
    def weight(self) -> BackendTensor | float | None:
        """What this rank counts with in the step; None if ranks count alike."""
        told = self._told
        if not self.settings.make_exchange().takes_samples:
            return None
        if callable(told):
            raise ValueError(
                "optimizer.sample_weight is a function, which only fit and train_on_batch call: "
                "in your own loop, set it to a number in each step"
            )
        fixed = told is not None and not hasattr(told, "assign")  # as a variable has
        if fixed and not self._told_in_trace and self._backend.is_tracing():
            raise ValueError(
                f"optimizer.sample_weight was set to {told} outside of a function that is traced, "
                "which would count with it in all later steps: set it in the function, to a tensor "
                "or an argument"
            )
        return self._weigh() if told is None and self._weigh is not None else told

    @contextmanager
    def weighted(self, weigh: Weigh) -> Iterator[None]:
        """Weight gradients reduced or traced in this block, unless it sets a weight."""
        told, self.sample_weight, self._weigh = self.sample_weight, None, weigh
        try:
            yield
        finally:
            self.sample_weight, self._weigh = told, None

    @collective
    def __call__(
        self, gradients: Sequence[BackendTensor | None], variables: Sequence[KerasVariable]
    ) -> list[BackendTensor | None]:
        """Reduce gradients over the ranks; None counts as zero if any has one."""
        results, process_set = list(gradients), self.settings.process_set
        size = process_set.size() if process_set.included() else 1
        exchange = self.settings.make_exchange()
        if size == 1 and process_set.included():
            if not exchange.stateless or stays_alone(process_set):
                exchange.note_alone()
            else:
                size = None  # a step that is traced now may run with more ranks
        shared = [i for i, variable in enumerate(variables) if id(variable) not in self._local]
        own = [results[i] for i in shared]
        if process_set.included() and self._as_dense:
            own = self._backend.as_dense(own)
        if size != 1 and shared:
            chosen = [variables[i] for i in shared]
            own = self._backend.reduce(own, chosen, self, self.weight)
        for i, gradient in zip(shared, own, strict=True):
            results[i] = gradient
        if self._scale_local and size != 1:
            for i in set(range(len(results))) - set(shared):
                gradient = results[i]
                if gradient is not None and not is_overwritten(variables[i]):
                    ranks = self._backend.size_like(gradient, process_set)
                    results[i] = keras.ops.divide(gradient, ranks)
        return scaled(results, variables, self._factor)

    @property
    def _as_dense(self) -> bool:
        return self.settings.sparse_as_dense or self.sharded or self.uneven

    @collective
    def update_together(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
    ) -> None:
        """Update variables together with the other ranks of the node."""
        assert self.shared is not None
        self.shared(optimizer, gradients, variables, self.weight)

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks step on their own gradients now, and exchange weights."""
        return self.weights is not None and self.weights.exchanges_weights

    @collective
    def update_alone(
        self,
        update: Callable[[Sequence[BackendTensor | None]], None],
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        """Update variables, and exchange their values if that is due (collective if due)."""
        if self.weights is not None:
            own = self._backend.as_dense(gradients) if self._as_dense else gradients
            own = scaled(own, variables, self._factor)
            self.weights.update(update, own, variables, self._local, self.weight, optimizer)

    @collective
    def flush(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Make values that ranks exchange equal now; gradients need no flush."""
        if self.weights is not None:
            variables = optimizer._trainable_variables
            shared = [each for each in variables if id(each) not in self._local]
            self.weights.flush(shared, optimizer)

    @collective
    def reduce_arrays(
        self,
        arrays: Sequence[HostArray | None],
        variables: Sequence[KerasVariable],
        samples: float | None,
        zeros: Callable[[int], HostArray],
        fixed: bool = False,
    ) -> list[HostArray | None]:
        """Reduce gradients that are arrays as one operation."""

        def reduce(given: Sequence[HostArray], layout: Layout) -> list[HostArray]:
            return self.reduce_layout(given, variables, layout, samples)[0]

        names = [variable.path for variable in variables]
        return reduce_present(arrays, names, self.name, zeros, reduce, fixed)

    @collective
    def reduce_layout(
        self,
        arrays: Sequence[HostArray],
        variables: Sequence[KerasVariable],
        layout: Layout,
        samples: float | None,
        name: str | None = None,
    ) -> tuple[list[HostArray], float]:
        """Reduce the dense gradients of a layout as one operation."""
        own, owners = OwnStep(samples, self.steps), [variables[i] for i in layout.dense]
        weights = partial(self._backend.weight_sums, owners)
        results, info = exchange_fused(
            arrays, owners, name or self.name, self.settings, own, layout, weights
        )
        self.steps += 1
        return results, info.weigh()

    def exchange_state(self, optimizer: keras.optimizers.Optimizer) -> SavedExchange:
        counts: Mapping[str, float | None] = {}
        if self.weights is not None:
            counts = self.weights.counts(optimizer)
        ranks = self.settings.process_set.size() or 0
        return save_exchange(self.settings.make_exchange(), self.steps, ranks, counts)

    def load_exchange_state(self, state: SavedExchange) -> None:
        members = self.settings.process_set
        first = members.included() and members.rank() == 0
        exchange = self.settings.make_exchange()
        self.steps, counts = load_exchange(exchange, state, members.size() or 0, first)
        if self.weights is not None:
            self.weights.begin_anew(counts)


def scaled(
    gradients: Sequence[BackendTensor | None],
    variables: Sequence[KerasVariable],
    factor: BackendTensor | float,
) -> list[BackendTensor | None]:
    """Return gradients times a factor, except for what overwrites a variable."""
    if isinstance(factor, float) and factor == 1.0:
        return list(gradients)
    return [
        g if g is None or is_overwritten(v) else keras.ops.multiply(g, factor)
        for g, v in zip(gradients, variables, strict=True)
    ]
