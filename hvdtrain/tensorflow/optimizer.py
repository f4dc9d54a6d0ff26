"""DistributedOptimizer: the user's optimizer, with gradients that are reduced over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.core.compression import Compressor
from hvdtrain.core.gradient_settings import Groups, choose_groups
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.gradients import LocalAggregation, VariableReduction
from hvdtrain.tensorflow.graph import Gradient, Variable, do_not_convert
from hvdtrain.tensorflow.operations import grouped_allreduce
from hvdtrain.types import ReduceOp

Pairs: TypeAlias = list[tuple[Gradient, Variable]]

_PACKAGE = "tf_keras."


def is_tf_keras(instance: object) -> bool:
    """Return whether a class of an object is of tf_keras."""
    return any(kind.__module__.startswith(_PACKAGE) for kind in type(instance).__mro__)


class ReducingMixin:
    """Base class of optimizers of Keras 3 and tf_keras that reduce gradients."""

    _hvdtrain_reduced: VariableReduction
    _hvdtrain_aggregation: LocalAggregation | None
    iterations: tf.Variable

    def register_local_var(self, var: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._hvdtrain_reduced.add_local(var)

    def _hvdtrain_count(self) -> None:
        self.iterations.assign_add(1)


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
        with tf.init_scope():
            if hasattr(self, "_create_all_weights"):  # of tf_keras.optimizers.legacy
                self._create_all_weights(variables)
            else:
                self.build(variables)  # type: ignore[attr-defined]
        reduced = aggregation.add([gradient for gradient, _ in pairs], variables)
        reduced_pairs = list(zip(reduced, variables, strict=True))

        def apply() -> None:
            update(reduced_pairs, experimental_aggregate_gradients=False)

        tf.cond(aggregation.complete(), apply, self._hvdtrain_count)
        return self.iterations


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


def _reducing_class(optimizer: object) -> Any:
    """Return a subclass of an optimizer's class whose instances reduce gradients."""
    kind, keras = type(optimizer), sys.modules.get("keras")
    mixin: type = _KerasOptimizerMixin
    package, public = "keras.src.optimizers.", "keras.optimizers"
    if is_tf_keras(optimizer):
        if hasattr(optimizer, "inner_optimizer"):
            raise ValueError(
                f"DistributedOptimizer does not take a {kind.__name__} of tf_keras: wrap the "
                "optimizer in it, as in LossScaleOptimizer(hvd.DistributedOptimizer(optimizer))"
            )
        if not hasattr(kind, "aggregate_gradients") and not hasattr(kind, "_aggregate_gradients"):
            raise ValueError(
                "DistributedOptimizer takes an optimizer of tf_keras.optimizers, got "
                f"{kind.__name__}"
            )
        legacy = ".legacy" if hasattr(kind, "_create_all_weights") else ""
        mixin, package, public = TfKerasOptimizerMixin, "tf_keras.src.", f"tf_{public}{legacy}"
    elif keras is None or not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "DistributedOptimizer takes an optimizer of tf.keras, tf_keras or tf.compat.v1.train, "
            f"got {kind.__name__}"
        )
    members: dict[str, Any] = {}
    if mixin is _KerasOptimizerMixin:
        from hvdtrain.tensorflow.keras_steps import faster_steps  # imports Keras 3

        members = faster_steps(kind)
    # Keras finds the class by this name, so that a saved model loads without hvdtrain.
    module = public if kind.__module__.startswith(package) else kind.__module__
    return type(kind.__name__, (mixin, kind), {"__module__": module, **members})


class GraphOptimizerWrapper(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of tf.compat.v1.train that delegates to another one."""

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        name: str,
        use_locking: bool,
        reduction: VariableReduction,
        aggregation: LocalAggregation | None,
    ) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer, self._reduction, self._aggregation = optimizer, reduction, aggregation
        self.get_slot, self.get_slot_names = optimizer.get_slot, optimizer.get_slot_names
        self.variables = optimizer.variables

    @do_not_convert
    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        pairs: Pairs = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs

    @do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, Variable]],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation | None:
        return self._optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)


class ReducingOptimizer(GraphOptimizerWrapper):
    """Reduces the gradients that the wrapped optimizer computes."""

    def register_local_var(self, var: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._reduction.add_local(var)

    @do_not_convert
    @collective
    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduce = self._aggregation.add if self._aggregation else self._reduction
        return list(zip(reduce(gradients, variables), variables, strict=True))

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
        process_set = self._reduction.settings.process_set
        if process_set.included() and updates:
            updates = grouped_allreduce(
                updates,
                op=ReduceOp.ADASUM,
                compression=self._reduction.compressor,
                process_set=process_set,
                name=f"{self.get_name()}_steps",
            )
        assigned = [
            variable.assign(old + update)
            for variable, old, update in zip(variables, before, updates, strict=True)
        ]
        return None if tf.executing_eagerly() else tf.group(*assigned)


@do_not_convert
def DistributedOptimizer(
    optimizer: Optimizer,
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
) -> Optimizer | GraphOptimizerWrapper:
    """Return an optimizer that reduces gradients over the ranks before it applies them (local).

    Args:
        optimizer: optimizer of tf.compat.v1.train, which is wrapped, and whose compute_gradients()
            then reduces; or an optimizer of Keras 3 or tf_keras (Keras 2), from whose configuration
            a new one is made, whose apply() or apply_gradients() reduces.
        name: name of the wrapper.
        use_locking: locking of the wrapper.
        device_dense: ignored.
        device_sparse: ignored.
        compression: compressor; Compression.fp16 and bf16 round what crosses the network.
        sparse_as_dense: make tf.IndexedSlices dense instead of gathering the slices.
        backward_passes_per_step: number of passes whose gradients are added up locally before they
            are reduced; variables change after the last of them only.
        op: Average, Sum, or another reduction. Adasum combines the ranks' updates instead of
            gradients, and is not for Keras.
        gradient_predivide_factor: divisor of gradients before the sum of an average, which is
            divided by size / gradient_predivide_factor.
        average_aggregated_gradients: divide the sum of the passes by backward_passes_per_step.
        num_groups: deprecated; a number as `groups`.
        groups: number of groups that are reduced together, or lists of variables.
        process_set: ranks that take part; other ranks apply their own gradients.
        scale_local_gradients: divide gradients of local variables by the number of ranks.

    Raises:
        TypeError: `process_set` is not a process set.
        ValueError: the optimizer is distributed already, or arguments are invalid or exclude each
            other.
    """
    if isinstance(optimizer, GraphOptimizerWrapper | ReducingMixin):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}"
        )
    of_graph = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    name = name or f"Distributed{type(optimizer).__name__}"
    reduction = VariableReduction(
        f"{name}_gradients" if of_graph else "DistributedOptimizer_gradients",
        op,
        process_set,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        choose_groups(num_groups, groups),
        scale_local_gradients,
    )
    aggregation: LocalAggregation | None = None
    if backward_passes_per_step > 1:
        aggregation = LocalAggregation(
            backward_passes_per_step, average_aggregated_gradients, reduction
        )
    if not of_graph:
        kind, original = _reducing_class(optimizer), cast(Any, optimizer)
        if op is ReduceOp.ADASUM:
            raise ValueError("op=Adasum is not supported with Keras optimizers")
        distributed = kind.from_config(original.get_config())
        distributed._hvdtrain_reduced = reduction
        distributed._hvdtrain_aggregation = aggregation
        return cast(Optimizer, distributed)
    if op is ReduceOp.ADASUM and (average_aggregated_gradients or aggregation is not None):
        raise ValueError("Adasum needs backward_passes_per_step=1")
    if aggregation is not None and tf.executing_eagerly():
        raise ValueError(
            "backward_passes_per_step > 1 with an optimizer of tf.compat.v1 needs a graph of "
            "TensorFlow 1: use an optimizer of tf.keras"
        )
    wrapper = AdasumOptimizer if op is ReduceOp.ADASUM else ReducingOptimizer
    return wrapper(optimizer, name, use_locking, reduction, aggregation)
