"""Optimizers of a subclass that reduces gradients before it steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.keras.backends.choose import chosen
from hvdtrain.keras.backends.reduction import Reduction

__all__ = ["Distributed", "distribute", "optimizers_of", "state_of", "undistributed"]


class Distributed:
    """Goes before the class of an optimizer."""

    hvdtrain_reduction: Reduction

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on its rank."""
        self.hvdtrain_reduction.keep_local(var)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduce the gradients, outside of any condition, and step (collective)."""
        given = None if trainable_variables is None else list(trainable_variables)
        variables = self._trainable_variables if given is None else given  # type: ignore[attr-defined]
        if len(grads) == len(variables):  # else Keras says what is wrong
            grads = self.hvdtrain_reduction(grads, variables)
        super().apply(grads, given)  # type: ignore[misc]


class _DistributedLossScale(Distributed):
    """Agrees on whether gradients are finite, since it looks at the reduced ones."""

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """Reduce the gradients and return the variables after the step (collective)."""
        reduced = self.hvdtrain_reduction(grads, self._trainable_variables)  # type: ignore[attr-defined]
        return super().stateless_apply(optimizer_variables, reduced, trainable_variables)  # type: ignore[misc]


def distribute(optimizer: Any, reduction: Reduction) -> Any:
    """Return an optimizer like this one, and with its state, that reduces gradients.

    Raises:
        ValueError: it reduces them already, or is no optimizer of Keras.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, Distributed) or isinstance(inner, Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        got = type(optimizer)
        legacy = got.__module__.startswith("tf_keras.")
        instead = ": hvdtrain.tensorflow.DistributedOptimizer takes those of tf_keras"
        raise ValueError(
            "DistributedOptimizer takes an optimizer of Keras 3, got "
            + (f"{got.__module__}.{got.__name__}{instead}" if legacy else got.__name__)
        )
    kind = type(optimizer)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    first = _DistributedLossScale if scales else Distributed
    # By these names Keras finds it, so that a saved model loads without hvdtrain.
    name = keras.saving.get_registered_name(kind)
    public = issubclass(kind, getattr(keras.optimizers, kind.__name__, ()))
    module = "keras.optimizers" if public else kind.__module__
    members = {
        "__module__": module,
        "apply": chosen().unconverted(first.apply),
        "hvdtrain_kind": kind,
    }
    # `apply` calls super() as a method of `first`, which comes next.
    made = _with_state_of(optimizer, type(name, (first, kind), members))
    made.hvdtrain_reduction = reduction
    return made


def optimizers_of(model: Any) -> list[Any]:
    """Return the distributed optimizers of a model: its own, and those its attributes hold."""
    own = [getattr(model, "optimizer", None)]
    for value in vars(model).values():
        if isinstance(value, dict):
            own.extend(value.values())
        elif isinstance(value, list | tuple):
            own.extend(value)
        else:
            own.append(value)
    found = {id(each): each for each in own if isinstance(each, Distributed)}
    return list(found.values())


def state_of(model: Any) -> list[Any]:
    """Return the weights of a model, and the variables of its optimizers; builds its own one."""
    own = model.optimizer
    if own is not None and not own.built:
        own.build(model.trainable_variables)
    optimizers = {id(each): each for each in (own, *optimizers_of(model)) if each is not None}
    return [*model.weights, *(v for each in optimizers.values() for v in each.variables)]


def undistributed(optimizer: Any) -> Any:
    """Return a DistributedOptimizer's optimizer, with its state, without the reduction."""
    made = _with_state_of(optimizer, optimizer.hvdtrain_kind)
    del made.hvdtrain_reduction
    return made


def _with_state_of(optimizer: Any, kind: Any) -> Any:
    """Return an optimizer of this class that shares the other's variables."""
    made = kind.__new__(kind)
    made.__dict__.update(optimizer.__dict__)
    return made
