"""Distributed optimizers: of a subclass that reduces gradients before it applies them."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.keras.backends.backend import current_backend
from hvdtrain.keras.backends.loss_scale import LossScaleMixin
from hvdtrain.keras.backends.optimizer_mixin import DistributedMixin
from hvdtrain.keras.backends.reduction import Reduction
from hvdtrain.keras.backends.refusals import refuse_weights
from hvdtrain.keras.sharding.rules import check_shared
from hvdtrain.keras.tensors.arrays import to_array
from hvdtrain.keras.tensors.types import Model, Variable


def distribute(optimizer: keras.optimizers.Optimizer, reduction: Reduction) -> DistributedMixin:
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
    return distributed


def _rebuilt(optimizer: keras.optimizers.Optimizer, reduction: Reduction) -> DistributedMixin:
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


def distributed_optimizers(model: Model) -> list[DistributedMixin]:
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


def training_state(model: Model) -> list[Variable]:
    """Return the weights of a model and its optimizers' variables; builds its optimizer."""
    own = model.optimizer
    if own is not None and not own.built:
        own.build(model.trainable_variables)
    optimizers = {
        id(each): each for each in (own, *distributed_optimizers(model)) if each is not None
    }
    return [*model.weights, *(v for each in optimizers.values() for v in each.variables)]
