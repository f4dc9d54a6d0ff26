"""Optimizers of tf_keras, which is Keras 2, that reduce gradients before they apply them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.tensorflow.gradients.aggregation import LocalAggregation
from hvdtrain.tensorflow.gradients.gradients import (
    GradientSettings,
    LocalVariables,
    reduce_gradients,
)
from hvdtrain.tensorflow.graph.autograph import unconverted

__all__ = ["DistributedTfKeras", "is_tf_keras", "tf_keras_class"]

Pairs = list[tuple[Any, Any]]

_PACKAGE = "tf_keras."


def is_tf_keras(thing: object) -> bool:
    """Return whether something is an object of tf_keras (local)."""
    return any(kind.__module__.startswith(_PACKAGE) for kind in type(thing).__mro__)


class DistributedTfKeras:
    """Goes before the class of an optimizer.

    Gradients are reduced where Keras aggregates those of several devices: in apply_gradients(),
    and so in minimize() and fit(). A LossScaleOptimizer around it asks for it before it looks for
    gradients that are not finite. The caller may say that it has aggregated them itself.
    """

    _hvdtrain_settings: GradientSettings
    _hvdtrain_local: LocalVariables
    _hvdtrain_aggregation: LocalAggregation | None
    iterations: Any

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on its rank."""
        self._hvdtrain_local.add(var)

    @unconverted
    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Pairs:
        """Return pairs of reduced gradient and variable (collective)."""
        pairs = list(grads_and_vars)
        if self._hvdtrain_aggregation is not None:
            raise ValueError(
                "backward_passes_per_step > 1 does not go with a LossScaleOptimizer of tf_keras: "
                "use backward_passes_per_step=1, or an optimizer of Keras 3"
            )
        return self._hvdtrain_reduced_pairs(pairs)

    _aggregate_gradients = aggregate_gradients  # as tf_keras.optimizers.legacy calls it

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients and step; with several passes only after the last (collective)."""
        step = super().apply_gradients  # type: ignore[misc]
        aggregation = self._hvdtrain_aggregation
        if aggregation is None:
            return step(grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        self._hvdtrain_build(variables)
        reduced = aggregation.add([gradient for gradient, _ in pairs], variables)
        kept = list(zip(reduced, variables, strict=True))

        def apply() -> None:
            step(kept, experimental_aggregate_gradients=False)

        def count() -> None:
            self.iterations.assign_add(1)

        tf.cond(aggregation.complete(), apply, count)
        return self.iterations

    def _hvdtrain_build(self, variables: list[Any]) -> None:
        """Make the optimizer's variables, which a branch of a graph must not."""
        with tf.init_scope():
            if hasattr(self, "_create_all_weights"):  # of tf_keras.optimizers.legacy
                self._create_all_weights(variables)
            else:
                self.build(variables)  # type: ignore[attr-defined]

    def _hvdtrain_reduced_pairs(self, pairs: Pairs) -> Pairs:
        variables = [variable for _, variable in pairs]
        reduced = self._hvdtrain_reduced([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def _hvdtrain_reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        return reduce_gradients(
            gradients,
            variables,
            self._hvdtrain_settings,
            self._hvdtrain_local,
            "DistributedOptimizer_gradients",
        )


def tf_keras_class(optimizer: Any) -> type[Any]:
    """Return a class like that of an optimizer of tf_keras, whose instances reduce gradients.

    Raises:
        ValueError: it is no optimizer of tf_keras, or one that wraps another.
    """
    kind = type(optimizer)
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            f"DistributedOptimizer does not take a {kind.__name__} of tf_keras: wrap the optimizer "
            "in it, as in LossScaleOptimizer(hvd.DistributedOptimizer(optimizer))"
        )
    if not hasattr(kind, "aggregate_gradients") and not hasattr(kind, "_aggregate_gradients"):
        raise ValueError(
            f"DistributedOptimizer takes an optimizer of tf_keras.optimizers, got {kind.__name__}"
        )
    # By this name Keras finds it, so that a saved model loads without hvdtrain.
    legacy = ".legacy" if hasattr(kind, "_create_all_weights") else ""
    ours = kind.__module__.startswith(f"{_PACKAGE}src.")
    module = f"tf_keras.optimizers{legacy}" if ours else kind.__module__
    return type(kind.__name__, (DistributedTfKeras, kind), {"__module__": module})
