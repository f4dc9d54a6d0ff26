"""Distributed optimizers: of a subclass that reduces gradients before it applies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.collective import collective
from hvdtrain.core.arguments import GradientSettings
from hvdtrain.core.gradients.exchange import InnerState
from hvdtrain.keras.backends.backend import current_backend
from hvdtrain.keras.backends.optimizer_mixin import DistributedMixin
from hvdtrain.keras.backends.reduction import GradientReduction
from hvdtrain.keras.backends.sharding import check_shared
from hvdtrain.keras.backends.types import BackendTensor, KerasModel, KerasVariable, to_array


class LossScaleMixin(DistributedMixin):
    """Base class of distributed LossScaleOptimizers: whether gradients are finite is agreed on.

    They reduce gradients before they look for values that are not finite. If ranks exchange
    weights, each looks at its own gradients, and leaves out an update, but no exchange.
    """

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
                reduced = self._reduce(grads, own)
            updated = super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, reduced, trainable_variables
            )
            return updated
        values = [*trainable_variables, *optimizer_variables]
        state = list(zip([*own, *self.variables], values, strict=True))
        with keras.StatelessScope(state_mapping=state) as scope:
            reduction.update_alone(self._update_alone, grads, own, self)
        results = [scope.get_current_value(variable) for variable, _ in state]
        return results[: len(own)], results[len(own) :]

    def _reduce(
        self, grads: Sequence[BackendTensor | None], variables: Sequence[KerasVariable]
    ) -> list[BackendTensor | None]:
        exchange = self.exchange
        if exchange is None or not exchange.uses_scale:
            return super()._reduce(grads, variables)
        # What the exchange keeps for later steps must not be in units of this step's scale.
        scale: BackendTensor | float = self.initial_scale
        if self.built:
            scale = keras.ops.convert_to_tensor(self.dynamic_scale)
        reduced = super()._reduce([_divided(g, scale) for g in grads], variables)
        inverse = keras.ops.divide(1.0, scale)
        return [_divided(gradient, inverse) for gradient in reduced]

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


def _divided(
    gradient: BackendTensor | None, divisor: BackendTensor | float
) -> BackendTensor | None:
    return None if gradient is None else keras.ops.divide(gradient, divisor)


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
    }
    if optimizer.built and reduction.weights is not None:
        reduction.weights.inner_state.note_built(optimizer, is_new=False)
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


def distributed_optimizers(model: KerasModel) -> list[DistributedMixin]:
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


def training_state(model: KerasModel) -> list[KerasVariable]:
    """Return the weights of a model and its optimizers' variables; builds its optimizer."""
    own = model.optimizer
    if own is not None and not own.built:
        own.build(model.trainable_variables)
    optimizers = {
        id(each): each for each in (own, *distributed_optimizers(model)) if each is not None
    }
    return [*model.weights, *(v for each in optimizers.values() for v in each.variables)]
