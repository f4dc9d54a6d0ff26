"""Optimizers of Keras on TensorFlow, that reduce gradients before they apply them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.tensorflow.gradients.aggregation import LocalAggregation
from hvdtrain.tensorflow.gradients.gradients import (
    GradientSettings,
    LocalVariables,
    reduce_gradients,
)
from hvdtrain.tensorflow.gradients.tf_keras_optimizer import (
    DistributedTfKeras,
    is_tf_keras,
    tf_keras_class,
)
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.types import ReduceOp

__all__ = ["distributed_keras_optimizer"]


class _Distributed:
    """Goes before the class of an optimizer of Keras 3."""

    _hvdtrain_settings: GradientSettings
    _hvdtrain_local: LocalVariables
    _hvdtrain_aggregation: LocalAggregation | None
    built: bool

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on its rank."""
        self._hvdtrain_local.add(var)

    @unconverted
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduce the gradients and step (collective)."""
        step = super().apply  # type: ignore[misc]
        variables = trainable_variables
        if variables is None:
            variables = self._trainable_variables  # type: ignore[attr-defined]
        variables = list(variables)
        aggregation = self._hvdtrain_aggregation
        if aggregation is None:
            step(self._hvdtrain_reduced(grads, variables), variables)
            return
        if not self.built:  # makes variables, which a branch of a graph must not
            self.build(variables)  # type: ignore[attr-defined]
        reduced = aggregation.add(grads, variables)

        def count() -> None:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]

        tf.cond(aggregation.complete(), lambda: step(reduced, variables), count)

    def _hvdtrain_reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return reduce_gradients(
            gradients,
            variables,
            self._hvdtrain_settings,
            self._hvdtrain_local,
            "DistributedOptimizer_gradients",
        )


def distributed_keras_optimizer(
    optimizer: Any,
    settings: GradientSettings,
    local: LocalVariables,
    passes: int = 1,
    average: bool = False,
) -> Any:
    """Return an optimizer like this one that steps on the gradients of all ranks.

    Args:
        optimizer: of Keras 3 or of tf_keras, which is Keras 2.
        settings: how gradients are reduced.
        local: variables whose gradients are not.
        passes: backward passes that add up locally before a reduction.
        average: divide the reduced sum by their number.

    Raises:
        ValueError: it is distributed already, no optimizer, a LossScaleOptimizer of tf_keras, or
            with Adasum.
    """
    if isinstance(optimizer, _Distributed | DistributedTfKeras):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    distributed: Any = tf_keras_class if is_tf_keras(optimizer) else _keras_3_class
    kind = distributed(optimizer)
    if settings.op is ReduceOp.ADASUM:
        raise ValueError("op=Adasum does not go with optimizers of Keras")
    made = kind.from_config(optimizer.get_config())
    made._hvdtrain_settings, made._hvdtrain_local = settings, local
    made._hvdtrain_aggregation = None
    if passes > 1:
        made._hvdtrain_aggregation = LocalAggregation(
            passes, average, settings.sparse_as_dense, made._hvdtrain_reduced
        )
    return made


def _keras_3_class(optimizer: Any) -> type[Any]:
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "DistributedOptimizer takes an optimizer of tf.keras, tf_keras or tf.compat.v1.train, "
            f"got {type(optimizer).__name__}"
        )
    kind = type(optimizer)
    # By this name Keras finds it, so that a saved model loads without hvdtrain.
    module = kind.__module__
    module = "keras.optimizers" if module.startswith("keras.src.optimizers.") else module
    return type(kind.__name__, (_Distributed, kind), {"__module__": module})
