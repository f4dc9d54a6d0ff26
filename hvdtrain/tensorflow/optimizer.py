"""The optimizer wrappers: the user's optimizer, stepping on gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.core.arguments import Groups, choose_groups
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensorflow.gradients.aggregation import LocalAggregation
from hvdtrain.tensorflow.gradients.gradients import (
    GradientSettings,
    LocalVariables,
    reduce_gradients,
)
from hvdtrain.tensorflow.gradients.keras_optimizer import distributed_keras_optimizer
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.tensorflow.operations.compression import Compression, Compressor
from hvdtrain.tensorflow.operations.ops import grouped_allreduce
from hvdtrain.types import ReduceOp

__all__ = ["DistributedOptimizer"]


@unconverted
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer so that it steps on the gradients of all ranks.

    Args:
        optimizer: of tf.compat.v1.train, whose compute_gradients() then reduces, or of Keras 3 or
            tf_keras (Keras 2), whose apply() or apply_gradients() then does; of these a new one is
            made from its configuration.
        name: of the wrapper.
        use_locking: of the wrapper.
        device_dense: makes no difference.
        device_sparse: makes no difference.
        compression: how gradients are rounded before they are added.
        sparse_as_dense: make tf.IndexedSlices dense, instead of gathering the slices.
        backward_passes_per_step: passes whose gradients are added up locally before they are
            reduced; variables change after the last of them only.
        op: Average, Sum, or another reduction. Adasum combines the ranks' steps instead of
            gradients; not with Keras.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum, and
            by size / it after.
        average_aggregated_gradients: divide what was added up by backward_passes_per_step.
        num_groups: deprecated; the same as a number for `groups`.
        groups: how many groups of gradients are reduced together, or lists of variables.
        process_set: the ranks that take part; other ranks step on their own gradients.
        scale_local_gradients: divide gradients of local variables by the number of ranks.

    Raises:
        ValueError: the optimizer is distributed already, or arguments do not go together.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}"
        )
    settings = GradientSettings(
        op,
        process_set,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        choose_groups(num_groups, groups),
    )
    passes = (backward_passes_per_step, average_aggregated_gradients)
    local = LocalVariables(scale_local_gradients)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return distributed_keras_optimizer(optimizer, settings, local, *passes)
    if op is not ReduceOp.ADASUM:
        return _DistributedOptimizer(optimizer, name, use_locking, settings, local, *passes)
    if average_aggregated_gradients or backward_passes_per_step > 1:
        raise ValueError("Adasum goes with backward_passes_per_step=1 only")
    return _AdasumOptimizer(optimizer, name, use_locking, settings)


class _Distributed(tf.compat.v1.train.Optimizer):
    """Hands everything on to the wrapped optimizer."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool) -> None:
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of gradient and variable."""
        pairs: list[tuple[Any, Any]] = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs

    @unconverted
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Step."""
        return self._optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped optimizer's slot."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped optimizer's variables."""
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_Distributed):
    """Reduces the gradients that it computes."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        settings: GradientSettings,
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

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of a variable on its rank."""
        self._local.add(var)

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradient and variable (collective)."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduce = self._aggregation.add if self._aggregation else self._reduced
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        name = f"{self.get_name()}_gradients"
        return reduce_gradients(gradients, variables, self._settings, self._local, name)

    @unconverted
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Step; with backward_passes_per_step only after the last pass."""
        if self._aggregation is None:
            return super().apply_gradients(grads_and_vars, global_step, name)
        pairs = list(grads_and_vars)
        aggregation, step = self._aggregation, super().apply_gradients

        def count() -> Any:
            return tf.no_op() if global_step is None else tf.group(global_step.assign_add(1))

        with tf.control_dependencies([g for g, _ in pairs if g is not None]):
            return tf.compat.v1.cond(
                aggregation.complete(), lambda: tf.group(step(pairs, global_step, name)), count
            )


class _AdasumOptimizer(_Distributed):
    """Takes w = w + adasum_r(step_r(w) - w) with the steps of all ranks."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, settings: GradientSettings
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._settings = settings

    @unconverted
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Step on this rank's gradients, and combine the steps (collective)."""
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        before = [variable + 0 for variable in variables]  # a copy
        with tf.control_dependencies(before):
            stepped = super().apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([] if stepped is None else [stepped]):
            after = [variable.read_value() for variable in variables]
        steps = [there - here for there, here in zip(after, before, strict=True)]
        settings = self._settings
        if settings.process_set.included() and steps:
            steps = grouped_allreduce(
                steps,
                op=ReduceOp.ADASUM,
                compression=settings.compression,
                process_set=settings.process_set,
                name=f"{self.get_name()}_steps",
            )
        moved = [
            variable.assign(start + step)
            for variable, start, step in zip(variables, before, steps, strict=True)
        ]
        return None if tf.executing_eagerly() else tf.group(*moved)
