"""Keras optimizers on TensorFlow that reduce gradients before they apply them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.tensorflow.gradients.reduction import (
    LocalAggregation,
    LocalVariables,
    VariableSettings,
)
from hvdtrain.tensorflow.gradients.tf_keras_optimizer import (
    ReducingMixin,
    is_tf_keras,
    tf_keras_class,
)
from hvdtrain.tensorflow.graph import Gradient, Variable, do_not_convert
from hvdtrain.types import ReduceOp

Optimizer = TypeVar("Optimizer")


class _KerasOptimizerMixin(ReducingMixin):
    """Base class of distributed optimizers, before the class of an optimizer of Keras 3."""

    _trainable_variables: Sequence[Variable]
    built: bool

    @do_not_convert
    @collective
    def apply(
        self, grads: Sequence[Gradient], trainable_variables: Iterable[Variable] | None = None
    ) -> None:
        """Reduce the gradients and update the variables."""
        update = super().apply  # type: ignore[misc]
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(given)
        aggregation = self._hvdtrain_aggregation
        if aggregation is None:
            update(self._hvdtrain_reduced(grads, variables), variables)
            return
        if not self.built:  # creates variables, which is not possible in a branch of a graph
            self.build(variables)  # type: ignore[attr-defined]
        reduced = aggregation.add(grads, variables)
        count = self._hvdtrain_count
        tf.cond(aggregation.complete(), lambda: update(reduced, variables), count)


def distributed_keras_optimizer(
    optimizer: Optimizer,
    settings: VariableSettings,
    local: LocalVariables,
    passes: int = 1,
    average: bool = False,
) -> Optimizer:
    """Return a new optimizer, with the configuration of another, that reduces gradients."""
    if isinstance(optimizer, ReducingMixin):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    kind: Any = (tf_keras_class if is_tf_keras(optimizer) else _keras_3_class)(optimizer)
    if settings.op is ReduceOp.ADASUM:
        raise ValueError("op=Adasum is not supported with Keras optimizers")
    original: Any = optimizer
    distributed = kind.from_config(original.get_config())
    distributed._hvdtrain_settings, distributed._hvdtrain_local = settings, local
    distributed._hvdtrain_aggregation = None
    if passes > 1:
        distributed._hvdtrain_aggregation = LocalAggregation(
            passes, average, settings.sparse_as_dense, distributed._hvdtrain_reduced
        )
    result: Optimizer = distributed
    return result


def _keras_3_class(optimizer: object) -> type:
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "DistributedOptimizer takes an optimizer of tf.keras, tf_keras or tf.compat.v1.train, "
            f"got {type(optimizer).__name__}"
        )
    kind = type(optimizer)
    # Keras finds the class by this name, so that a saved model loads without hvdtrain.
    module = kind.__module__
    module = "keras.optimizers" if module.startswith("keras.src.optimizers.") else module
    return type(kind.__name__, (_KerasOptimizerMixin, kind), {"__module__": module})
