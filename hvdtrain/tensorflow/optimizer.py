"""DistributedOptimizer: the user's optimizer, with gradients that are reduced over the ranks."""

from __future__ import annotations

from typing import TypeVar

import tensorflow as tf

from hvdtrain.core.arguments import Groups, choose_groups
from hvdtrain.core.compression import Compressor
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.gradients.keras_optimizer import distributed_keras_optimizer
from hvdtrain.tensorflow.gradients.reduction import (
    LocalVariables,
    VariableSettings,
)
from hvdtrain.tensorflow.gradients.v1_optimizer import (
    AdasumOptimizer,
    GraphOptimizerWrapper,
    ReducingOptimizer,
)
from hvdtrain.tensorflow.graph import do_not_convert
from hvdtrain.types import ReduceOp

Optimizer = TypeVar("Optimizer")


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
    if isinstance(optimizer, GraphOptimizerWrapper):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}"
        )
    settings = VariableSettings.of(
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
        return ReducingOptimizer(optimizer, name, use_locking, settings, local, *passes)
    if average_aggregated_gradients or backward_passes_per_step > 1:
        raise ValueError("Adasum needs backward_passes_per_step=1")
    return AdasumOptimizer(optimizer, name, use_locking, settings)
