"""Optimizers of tf.compat.v1.train that reduce gradients, or combine updates, over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.tensorflow.gradients.reduction import (
    LocalAggregation,
    LocalVariables,
    VariableSettings,
    reduce_gradients,
)
from hvdtrain.tensorflow.graph import Gradient, Variable, do_not_convert
from hvdtrain.tensorflow.operations.reductions import grouped_allreduce
from hvdtrain.types import ReduceOp


class GraphOptimizerWrapper(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of tf.compat.v1.train that delegates to another one."""

    def __init__(
        self, optimizer: tf.compat.v1.train.Optimizer, name: str | None, use_locking: bool
    ) -> None:
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer

    @do_not_convert
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Gradient, Variable]]:
        pairs: list[tuple[Gradient, Variable]] = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        return self._optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def get_slot(self, *args: Any, **kwargs: Any) -> tf.Variable | None:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        names: list[str] = self._optimizer.get_slot_names(*args, **kwargs)
        return names

    def variables(self, *args: Any, **kwargs: Any) -> list[tf.Variable]:
        variables: list[tf.Variable] = self._optimizer.variables(*args, **kwargs)
        return variables


class ReducingOptimizer(GraphOptimizerWrapper):
    """Reduces the gradients that the wrapped optimizer computes."""

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        use_locking: bool,
        settings: VariableSettings,
        local: LocalVariables,
        passes: int,
        average: bool,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._settings, self._local = settings, local
        self._aggregation: LocalAggregation | None = None
        if passes > 1:
            if tf.executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step > 1 with an optimizer of tf.compat.v1 needs a graph "
                    "of TensorFlow 1: use an optimizer of tf.keras"
                )
            self._aggregation = LocalAggregation(
                passes, average, settings.sparse_as_dense, self._reduced
            )

    def register_local_var(self, var: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._local.add(var)

    @do_not_convert
    @collective
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Gradient, Variable]]:
        """Return pairs of reduced gradient and variable."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduce = self._aggregation.add if self._aggregation else self._reduced
        return list(zip(reduce(gradients, variables), variables, strict=True))

    @collective
    def _reduced(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[Gradient]:
        name = f"{self.get_name()}_gradients"
        return reduce_gradients(gradients, variables, self._settings, self._local, name)

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Update the variables; with backward_passes_per_step only after the last pass."""
        if self._aggregation is None:
            return super().apply_gradients(grads_and_vars, global_step, name)
        pairs = list(grads_and_vars)
        aggregation, update = self._aggregation, super().apply_gradients

        def count() -> tf.Operation:
            return tf.no_op() if global_step is None else tf.group(global_step.assign_add(1))

        with tf.control_dependencies([g for g, _ in pairs if g is not None]):
            return tf.compat.v1.cond(
                aggregation.complete(), lambda: tf.group(update(pairs, global_step, name)), count
            )


class AdasumOptimizer(GraphOptimizerWrapper):
    """Combines the updates of all ranks: w = w + adasum_r(update_r(w) - w)."""

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str | None,
        use_locking: bool,
        settings: VariableSettings,
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._settings = settings

    @do_not_convert
    @collective
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        """Update the variables with this rank's gradients, and combine the updates."""
        pairs = list(grads_and_vars)
        variables: list[tf.Variable] = [v for _, v in pairs]  # another rank may have the gradient
        before = [variable + 0 for variable in variables]  # a copy
        with tf.control_dependencies(before):
            updated = super().apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([] if updated is None else [updated]):
            after = [variable.read_value() for variable in variables]
        updates = [new - old for new, old in zip(after, before, strict=True)]
        settings = self._settings
        if settings.process_set.included() and updates:
            updates = grouped_allreduce(
                updates,
                op=ReduceOp.ADASUM,
                compression=settings.compressor,
                process_set=settings.process_set,
                name=f"{self.get_name()}_steps",
            )
        assigned = [
            variable.assign(old + update)
            for variable, old, update in zip(variables, before, updates, strict=True)
        ]
        return None if tf.executing_eagerly() else tf.group(*assigned)
