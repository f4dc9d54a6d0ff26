"""Optimizers of tf_keras, which is Keras 2, that reduce gradients before they apply them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.tensorflow.gradients.reduction import (
    LocalAggregation,
    LocalVariables,
    VariableSettings,
    reduce_gradients,
)
from hvdtrain.tensorflow.graph import Gradient, Variable, do_not_convert

Pairs: TypeAlias = list[tuple[Gradient, Variable]]

_PACKAGE = "tf_keras."


def is_tf_keras(instance: object) -> bool:
    """Return whether a class of an object is of tf_keras."""
    return any(kind.__module__.startswith(_PACKAGE) for kind in type(instance).__mro__)


class ReducingMixin:
    """Base class of optimizers of Keras 3 and tf_keras that reduce gradients."""

    _hvdtrain_settings: VariableSettings
    _hvdtrain_local: LocalVariables
    _hvdtrain_aggregation: LocalAggregation | None
    iterations: tf.Variable

    def register_local_var(self, var: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._hvdtrain_local.add(var)

    def _hvdtrain_count(self) -> None:
        self.iterations.assign_add(1)

    @collective
    def _hvdtrain_reduced(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[Gradient]:
        return reduce_gradients(
            gradients,
            variables,
            self._hvdtrain_settings,
            self._hvdtrain_local,
            "DistributedOptimizer_gradients",
        )


class TfKerasOptimizerMixin(ReducingMixin):
    """Base class of distributed optimizers, before the class of an optimizer of tf_keras.

    Gradients are reduced where Keras aggregates those of several devices: in apply_gradients(),
    and so in minimize() and fit(). A LossScaleOptimizer around the optimizer aggregates before it
    looks for gradients that are not finite. A caller that has aggregated them may say so.
    """

    @do_not_convert
    @collective
    def aggregate_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> Pairs:
        pairs = list(grads_and_vars)
        if self._hvdtrain_aggregation is not None:
            raise ValueError(
                "backward_passes_per_step > 1 cannot be combined with a LossScaleOptimizer of "
                "tf_keras: use backward_passes_per_step=1, or an optimizer of Keras 3"
            )
        variables = [variable for _, variable in pairs]
        reduced = self._hvdtrain_reduced([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    _aggregate_gradients = aggregate_gradients  # its name in tf_keras.optimizers.legacy

    @do_not_convert
    @collective
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, Variable]], *args: Any, **kwargs: Any
    ) -> tf.Variable | tf.Operation | None:
        """Reduce the gradients and update the variables, in the last pass of a step."""
        update = super().apply_gradients  # type: ignore[misc]
        aggregation = self._hvdtrain_aggregation
        if aggregation is None:
            return update(grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        self._hvdtrain_build(variables)
        reduced = aggregation.add([gradient for gradient, _ in pairs], variables)
        reduced_pairs = list(zip(reduced, variables, strict=True))

        def apply() -> None:
            update(reduced_pairs, experimental_aggregate_gradients=False)

        tf.cond(aggregation.complete(), apply, self._hvdtrain_count)
        return self.iterations

    def _hvdtrain_build(self, variables: Sequence[Variable]) -> None:
        """Create the optimizer's variables, which is not possible in a branch of a graph."""
        with tf.init_scope():
            if hasattr(self, "_create_all_weights"):  # of tf_keras.optimizers.legacy
                self._create_all_weights(variables)
            else:
                self.build(variables)  # type: ignore[attr-defined]


def tf_keras_class(optimizer: object) -> type:
    """Return a subclass of an optimizer's class whose instances reduce gradients."""
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
    # Keras finds the class by this name, so that a saved model loads without hvdtrain.
    legacy = ".legacy" if hasattr(kind, "_create_all_weights") else ""
    of_keras = kind.__module__.startswith(f"{_PACKAGE}src.")
    module = f"tf_keras.optimizers{legacy}" if of_keras else kind.__module__
    return type(kind.__name__, (TfKerasOptimizerMixin, kind), {"__module__": module})
