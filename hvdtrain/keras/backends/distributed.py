"""Distributed optimizers: of a subclass that reduces gradients before it applies them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import keras

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.fused import Layout, exchange_fused, is_overwritten
from hvdtrain.core.gradient_settings import GradientSettings, register_weighted
from hvdtrain.core.gradients.exchange import Exchange, InnerState, SavedExchange
from hvdtrain.core.gradients.step_info import OwnStep, StepCounter
from hvdtrain.core.process_set import stays_alone
from hvdtrain.errors import UsageError
from hvdtrain.keras.backends.backend import Backend
from hvdtrain.keras.backends.sharding import KerasSharedUpdate, StateVariable, check_shared
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable, to_array
from hvdtrain.keras.backends.weights import WeightExchange

# Takes the step of a rank's own optimizer on gradients.
Update: TypeAlias = Callable[[Sequence[BackendTensor | None]], None]
# Returns the weight of this rank in a step.
Weigh: TypeAlias = Callable[[], BackendTensor | float | None]
# What a program sets as sample_weight; a function takes x, y and sample_weight of a batch.
SampleWeight: TypeAlias = (
    BackendTensor | float | Callable[[Any, Any, Any], BackendTensor | float] | None
)

_BACKENDS = ("tensorflow", "torch", "jax")


@functools.cache  # also keeps AutoGraph from rewriting this function
def current_backend() -> Backend:
    name = keras.backend.backend()
    require_backend(name)
    # Imported here, because only the framework of this backend may be installed.
    if name == "tensorflow":
        from hvdtrain.keras.backends.tensorflow_backend import TensorFlowBackend

        return TensorFlowBackend()
    if name == "torch":
        from hvdtrain.keras.backends.torch_backend import TorchBackend

        return TorchBackend()
    from hvdtrain.keras.backends.jax_backend import JaxBackend

    return JaxBackend()


def require_backend(name: str) -> None:
    if name not in _BACKENDS:
        raise UsageError(
            f"hvdtrain.keras works with Keras's backends {', '.join(_BACKENDS)}, found {name!r}: "
            "set KERAS_BACKEND to one of them"
        )


class GradientReduction:
    """Reduces the gradients of an optimizer."""

    def __init__(
        self,
        settings: GradientSettings,
        name: str,
        factor: float,
        scale_local: bool,
        sharded: bool,
    ) -> None:
        self.settings, self.name, self._backend = settings, name, current_backend()
        self._factor, self._scale_local = factor, scale_local
        self.local: dict[int, KerasVariable] = {}  # whose gradients are not reduced
        self._weigh: Weigh | None = None
        self.told: SampleWeight = None
        self._told_in_trace = False
        self.uneven = False
        self.variables: Sequence[KerasVariable] = ()
        register_weighted(self)
        self.weights: WeightExchange | None = None
        if settings.weights:
            self.weights = WeightExchange(settings, name, self._backend, scale_local)
        self._counter = StepCounter() if self.weights is None else self.weights.counter
        self.sharded = sharded
        shared = KerasSharedUpdate(settings, name, self._backend) if sharded else None
        self.shared = shared if shared is not None and shared.active else None

    @property
    def steps(self) -> int:
        return self._counter.steps

    def add_local(self, variable: KerasVariable) -> None:
        """Do not reduce the gradient of a variable."""
        if self.shared is not None:
            raise ValueError("sharded=True: all gradients are reduced, and none is local")
        if self.weights is not None and self.weights.settles:
            raise ValueError(
                f"exchange {self.settings.make_exchange().spec!r} averages or resets the state of "
                "all variables, and cannot leave one out: give state=keep"
            )
        self.local[id(variable)] = variable  # kept, so that no other object gets its id

    def tell(self, weight: SampleWeight) -> None:
        """Note what the program says of this rank's weight in the next steps."""
        self.told, self._told_in_trace = weight, self._backend.is_tracing()

    def has(self, parameters: Set[int]) -> bool | None:
        """Return whether the optimizer updates one of these parameters; see Weighted."""
        if callable(self.told):  # for its own fit only
            return False
        own = set(map(id, self.variables))
        if not own or not parameters:  # it may learn them only when gradients are applied
            return None if self._weigh is None else True
        return not own.isdisjoint(parameters)

    @property
    def weight(self) -> BackendTensor | float | None:
        """What this rank counts with in the step; None if ranks count alike."""
        told = self.told
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
        told, self._weigh = self.told, weigh
        self.tell(None)
        try:
            yield
        finally:
            self.tell(told)
            self._weigh = None

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
        shared = [i for i, variable in enumerate(variables) if id(variable) not in self.local]
        own = [results[i] for i in shared]
        if process_set.included() and self._as_dense:
            own = self._backend.as_dense(own)
        if size != 1 and shared:
            chosen = [variables[i] for i in shared]
            average, name = partial(self._reduce_arrays, chosen), self.name
            own = self._backend.reduce(own, chosen, average, self.settings, name, self.weight)
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
    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        update: Update,
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
    ) -> None:
        """Reduce gradients and update variables, or exchange their values if that is due."""
        if self.shared is not None:
            if not optimizer.built:
                optimizer.build(variables)
            self.shared(optimizer, gradients, variables, self.weight)
        elif self.weights is not None:
            own = self._backend.as_dense(gradients) if self._as_dense else gradients
            own = scaled(own, variables, self._factor)
            self.weights.update(update, own, variables, self.local, self.weight, optimizer)
        else:
            # In a graph, variables that it makes now may depend on nothing.
            if variables and not optimizer.built:
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(variables)
            reduced = optimizer.hvdtrain_reduce(gradients, variables)
            # A graph would decay weights before the gradients arrive, while ranks compare these.
            with self._backend.after(reduced):
                update(reduced)

    @collective
    def _reduce_arrays(
        self,
        variables: Sequence[KerasVariable],
        arrays: Sequence[HostArray],
        layout: Layout,
        name: str | None,
        samples: float | None,
    ) -> tuple[list[HostArray], float]:
        own, owners = OwnStep(samples, self.steps), [variables[i] for i in layout.dense]
        weights = partial(self._backend.weight_sums, owners)
        results, info = exchange_fused(
            arrays, owners, name or self.name, self.settings, own, layout, weights
        )
        self._counter.steps += 1
        return results, info.weigh()

    def exchange_state(self, optimizer: keras.optimizers.Optimizer) -> SavedExchange:
        counts = {} if self.weights is None else self.weights.counts(optimizer)
        return self.settings.save_exchange(self.steps, counts)

    def load_exchange_state(self, state: SavedExchange) -> None:
        self._counter.steps, counts = self.settings.load_exchange(state)
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


class DistributedMixin:
    """Base class of distributed optimizers, before the class of the optimizer."""

    hvdtrain_reduction: GradientReduction
    hvdtrain_class: type
    learning_rate: BackendTensor | float
    variables: list[KerasVariable]
    built: bool
    name: str
    _track_variable: Callable[[StateVariable], None]
    _trainable_variables: Sequence[KerasVariable]

    def __getattr__(self, name: str) -> Any:
        problem = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name == "hvdtrain_reduction":
            kind = self.hvdtrain_class.__name__
            problem = (
                "this optimizer was made by the class of a DistributedOptimizer, so it does not "
                f"know its settings: wrap {kind}(...) or {kind}.from_config(...) instead"
            )
        raise AttributeError(problem)

    def register_local_var(self, var: KerasVariable) -> None:
        """Do not reduce the gradient of a variable."""
        self.hvdtrain_reduction.add_local(var)

    def exchange_state(self) -> SavedExchange:
        """Return the state of the exchange and the number of steps, for a checkpoint.

        A checkpoint needs that of each rank, because `own` differs between ranks.
        """
        return self.hvdtrain_reduction.exchange_state(self)

    def load_exchange_state(self, state: SavedExchange) -> None:
        """Restore the state of the exchange, when model and optimizer are restored."""
        self.hvdtrain_reduction.load_exchange_state(state)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange; None for the default average or sum."""
        return self.hvdtrain_reduction.settings.exchange

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks step on their own gradients, and exchange weights afterwards.

        With post-local SGD that is so from its switch on.
        """
        weights = self.hvdtrain_reduction.weights
        return weights is not None and weights.exchanges_weights

    @property
    def sample_weight(self) -> SampleWeight:
        """Weight of this rank in the next steps: what its loss divides by; None if not known.

        It is for loops of your own; `fit` and `train_on_batch` take it from Keras's losses, where
        it is None, or from a function of (x, y, sample_weight) of a batch, or from what a
        `train_step` of your own sets before it applies gradients. Gradients are
        averaged as sum_r(c_r g_r) / sum_r(c_r), where g_r is the gradient of rank r's mean loss;
        weights count with all samples since those of all ranks were equal. In a function that is
        traced, set it there to a tensor: keras.ops.shape(batch)[0] on TensorFlow, and an argument
        of the function on JAX, which traces it again for each shape.
        """
        return self.hvdtrain_reduction.told

    @sample_weight.setter
    def sample_weight(self, weight: SampleWeight) -> None:
        # A tensor may have no value yet.
        number = weight if weight is None or isinstance(weight, int | float) else 1.0
        self.hvdtrain_reduction.settings.check_sample_weight(number)
        self.hvdtrain_reduction.tell(weight)

    @property
    def sharded(self) -> bool:
        """Whether the ranks of the node share the optimizer's work."""
        return self.hvdtrain_reduction.shared is not None

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all ranks were equal."""
        weights = self.hvdtrain_reduction.weights
        return weights is None or weights.synchronized

    @collective
    def flush(self) -> None:
        """Exchange weights now if those of any rank have changed since all were equal.

        Afterwards all ranks have the same bits. With an exchange of gradients it does nothing.
        """
        weights, local = self.hvdtrain_reduction.weights, self.hvdtrain_reduction.local
        if weights is not None:
            weights.flush([v for v in self._trainable_variables if id(v) not in local], self)

    @property
    def iterations(self) -> BackendTensor:
        """Number of steps; during an update, of those since an exchange has reset the state.

        Keras's own learning rate schedules count all steps.
        """
        count = super().iterations  # type: ignore[misc]
        weights = self.hvdtrain_reduction.weights
        forgotten = None if weights is None else weights.forgotten
        if forgotten is None:
            return count
        passes = getattr(self, "gradient_accumulation_steps", None) or 1
        updates = keras.ops.cast(keras.ops.floor_divide(forgotten, passes), count.dtype)
        return keras.ops.subtract(count, updates)

    def build(self, variables: Sequence[KerasVariable]) -> None:
        is_new, weights = not self.built, self.hvdtrain_reduction.weights
        super().build(variables)  # type: ignore[misc]
        self.hvdtrain_reduction.variables = self._trainable_variables
        if is_new and self.hvdtrain_reduction.shared is not None:
            self.hvdtrain_reduction.shared.build(self)
        if is_new and weights is not None:
            weights.note_built(self, is_new=True)

    def add_variable_from_reference(
        self, reference_variable: KerasVariable, name: str | None = None, initializer: str = "zeros"
    ) -> KerasVariable | StateVariable:
        create = super().add_variable_from_reference  # type: ignore[misc]
        shared = self.hvdtrain_reduction.shared
        if shared is None:
            return create(reference_variable, name=name, initializer=initializer)
        own = f"{self.name}/{reference_variable.path.replace('/', '_')}_{name}"
        state = shared.keep(reference_variable, name or "var", own)
        self._track_variable(state)
        return state

    @collective
    def apply(
        self,
        grads: Sequence[BackendTensor | None],
        trainable_variables: Iterable[KerasVariable] | None = None,
    ) -> None:
        """Reduce gradients, outside of any condition, and update the variables."""
        given = None if trainable_variables is None else list(trainable_variables)
        variables = self._trainable_variables if given is None else given
        update: Update = partial(super().apply, trainable_variables=given)  # type: ignore[misc]
        if len(grads) != len(variables):  # Keras raises the error
            update(grads)
        else:
            self.hvdtrain_reduction.update(self, update, grads, variables)

    @collective
    def hvdtrain_reduce(
        self, grads: Sequence[BackendTensor | None], variables: Sequence[KerasVariable]
    ) -> list[BackendTensor | None]:
        """Reduce gradients over the ranks; None stays None."""
        return self.hvdtrain_reduction(grads, variables)


class LossScaleMixin(DistributedMixin):
    """Base class of distributed LossScaleOptimizers, which reduce before they look for infinity."""

    dynamic_scale: KerasVariable
    initial_scale: float

    @collective
    def stateless_apply(
        self,
        optimizer_variables: Sequence[BackendTensor],
        grads: Sequence[BackendTensor | None],
        trainable_variables: Sequence[BackendTensor],
    ) -> tuple[list[BackendTensor], list[BackendTensor]]:
        """Reduce gradients and return the updated variables."""
        updated: tuple[list[BackendTensor], list[BackendTensor]]
        own, reduction = self._trainable_variables, self.hvdtrain_reduction
        if reduction.weights is None:
            mapping = list(zip(self.variables, optimizer_variables, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                reduced = self.hvdtrain_reduce(grads, own)
            updated = super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, reduced, trainable_variables
            )
            return updated
        values = [*trainable_variables, *optimizer_variables]
        state = list(zip([*own, *self.variables], values, strict=True))
        with keras.StatelessScope(state_mapping=state) as scope:
            reduction.update(self, self._update_alone, grads, own)
        results = [scope.get_current_value(variable) for variable, _ in state]
        return results[: len(own)], results[len(own) :]

    def hvdtrain_reduce(
        self, grads: Sequence[BackendTensor | None], variables: Sequence[KerasVariable]
    ) -> list[BackendTensor | None]:
        exchange = self.exchange
        if exchange is None or not exchange.uses_scale:
            return super().hvdtrain_reduce(grads, variables)
        # What the exchange keeps for later steps must not be in units of this step's scale.
        scale: BackendTensor | float = self.initial_scale
        if self.built:
            scale = keras.ops.convert_to_tensor(self.dynamic_scale)
        unscaled = scaled(grads, variables, keras.ops.divide(1.0, scale))
        return scaled(super().hvdtrain_reduce(unscaled, variables), variables, scale)

    def _update_alone(self, grads: Sequence[BackendTensor | None]) -> None:
        """Update the variables if the gradients of this rank are finite."""
        own, others = self._trainable_variables, self.variables
        updated = super().stateless_apply(  # type: ignore[misc]
            [keras.ops.convert_to_tensor(variable) for variable in others],
            grads,
            [keras.ops.convert_to_tensor(variable) for variable in own],
        )
        for variable, value in zip([*own, *others], [*updated[0], *updated[1]], strict=True):
            variable.assign(value)


# Optimizers of keras.optimizers, some of which only later versions have.
_REASONS = {
    "ScheduleFreeAdamW": "whose state begins with the weights",
    "LossScaleOptimizer": "whose inner optimizer counts all of its steps",
}


def refuse_weights(settings: GradientSettings, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse what does not go with an exchange of weights in Keras."""
    exchange = settings.exchange
    if settings.weights and hasattr(optimizer, "optimizers"):
        raise ValueError(
            f"exchange {settings.make_exchange().spec!r} needs one learning rate, and "
            f"{type(optimizer).__name__} has several: use average or half"
        )
    if exchange is None or exchange.inner_state is not InnerState.RESET:
        return
    for name, reason in _REASONS.items():
        if isinstance(optimizer, getattr(keras.optimizers, name, ())):
            raise ValueError(
                f"exchange {exchange.spec!r} cannot reset the state of {name}, {reason}: give "
                "state=keep or state=average"
            )


def distribute(
    optimizer: keras.optimizers.Optimizer, reduction: GradientReduction
) -> DistributedMixin:
    """Return an optimizer with the state of another that reduces gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, DistributedMixin) or isinstance(inner, DistributedMixin):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        got = type(optimizer)
        legacy = got.__module__.startswith("tf_keras.")
        instead = ": hvdtrain.tensorflow.DistributedOptimizer takes those of tf_keras"
        raise ValueError(
            "DistributedOptimizer takes an optimizer of Keras 3, got "
            + (f"{got.__module__}.{got.__name__}{instead}" if legacy else got.__name__)
        )
    refuse_weights(reduction.settings, optimizer)
    if reduction.sharded:
        check_shared(optimizer, reduction.settings)
    if reduction.shared is not None and optimizer.built:
        return _rebuilt(optimizer, reduction)
    kind = type(optimizer)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    mixin = LossScaleMixin if scales else DistributedMixin
    # Keras finds the class by these names, so that a saved model loads without hvdtrain.
    name = keras.saving.get_registered_name(kind)
    public = issubclass(kind, getattr(keras.optimizers, kind.__name__, ()))
    module = "keras.optimizers" if public else kind.__module__
    # super() in `apply` of the mixin is the optimizer's class, which comes after the mixin.
    members = {
        "__module__": module,
        "apply": current_backend().do_not_compile(mixin.apply),
        "hvdtrain_class": kind,
        **current_backend().faster_steps(kind),
    }
    if optimizer.built and reduction.weights is not None:
        reduction.weights.note_built(optimizer, is_new=False)
    distributed: DistributedMixin = _with_state_of(optimizer, type(name, (mixin, kind), members))
    distributed.hvdtrain_reduction = reduction
    reduction.variables = getattr(optimizer, "_trainable_variables", ())
    return distributed


def _rebuilt(
    optimizer: keras.optimizers.Optimizer, reduction: GradientReduction
) -> DistributedMixin:
    """Return a distributed optimizer that keeps the state of another in memory of the node."""
    new = type(optimizer).from_config(optimizer.get_config())
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(new, name, getattr(optimizer, name))
    distributed = distribute(new, reduction)
    distributed.build(optimizer._trainable_variables)
    for variable, value in zip(distributed.variables, optimizer.variables, strict=True):
        variable.assign(to_array(value))
    return distributed


def undistribute(optimizer: DistributedMixin) -> keras.optimizers.Optimizer:
    """Return the optimizer of a distributed one, with its state, without the reduction."""
    plain = _with_state_of(optimizer, optimizer.hvdtrain_class)
    del plain.hvdtrain_reduction
    return plain


def _with_state_of(optimizer: keras.optimizers.Optimizer, kind: Any) -> Any:
    """Return an instance of a class that shares the state of an optimizer."""
    instance = kind.__new__(kind)
    instance.__dict__.update(optimizer.__dict__)
    return instance


def distributed_optimizers(model: keras.Model) -> list[DistributedMixin]:
    """Return the distributed optimizers of a model: its own and those in its attributes."""
    candidates = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        if isinstance(value, dict):
            candidates.extend(value.values())
        elif isinstance(value, list | tuple):
            candidates.extend(value)
        else:
            candidates.append(value)
    found = {id(each): each for each in candidates if isinstance(each, DistributedMixin)}
    return list(found.values())


def training_state(model: keras.Model) -> list[KerasVariable]:
    """Return the weights of a model and its optimizers' variables; builds its optimizer."""
    own = model.optimizer
    if own is not None and not own.built:
        own.build(model.trainable_variables)
    optimizers = {
        id(each): each for each in (own, *distributed_optimizers(model)) if each is not None
    }
    return [*model.weights, *(v for each in optimizers.values() for v in each.variables)]
