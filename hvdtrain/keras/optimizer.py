"""The optimizer wrappers, with Horovod's arguments."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.core.arguments import Groups, choose_groups
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.keras.backends.compression import Compression, Compressor
from hvdtrain.keras.backends.reduction import Reduction
from hvdtrain.keras.backends.settings import GradientSettings
from hvdtrain.keras.backends.wrapping import distribute
from hvdtrain.keras.models.hooks import hook_models
from hvdtrain.types import ReduceOp

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    num_groups: int = 0,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    exchange: Exchange | None = None,
) -> Any:
    """Wrap an optimizer of Keras 3 so that it steps on the gradients of all ranks.

    The result is of a subclass of its class, shares its variables, and is for `compile` or a loop
    of your own; do not use the optimizer itself any more. Clipping, weight decay, averages of
    weights and accumulation see the reduced gradients.

    Args:
        optimizer: of keras.optimizers, a LossScaleOptimizer included.
        name: of the operation; by default DistributedOptimizer_gradients.
        device_dense: makes no difference.
        device_sparse: makes no difference.
        compression: how gradients are rounded before they are added.
        sparse_as_dense: make tf.IndexedSlices dense, instead of gathering the slices.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum, and
            by size / it after.
        op: Average or Sum.
        num_groups: deprecated; the same as a number for `groups`.
        groups: how many groups of gradients are reduced together, or lists of variables.
        backward_passes_per_step: passes whose gradients are added up before a step; the same as
            Keras's gradient_accumulation_steps, of whose average it takes the sum.
        average_aggregated_gradients: take the average all the same.
        process_set: the ranks that take part; other ranks step on their own gradients.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        exchange: what is done with dense gradients instead of op and compression; an object of
            this optimizer's own.

    Raises:
        TypeError: `exchange` is none.
        ValueError: the optimizer is distributed already, or arguments do not go together.
        UsageError: Keras runs on a backend that hvdtrain does not know.
    """
    settings = GradientSettings(
        op,
        process_set,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        choose_groups(num_groups, groups),
        exchange,
    )
    hook_models()
    passes = backward_passes_per_step
    factor = 1.0 if average_aggregated_gradients else float(passes)
    reduction = Reduction(
        settings, name or "DistributedOptimizer_gradients", factor, scale_local_gradients
    )
    made = distribute(optimizer, reduction)
    if passes != 1:
        _accumulate(made, passes)
    return made


def _accumulate(optimizer: Any, passes: int) -> None:
    steps = getattr(optimizer, "inner_optimizer", optimizer)
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
    if steps.gradient_accumulation_steps or steps.built:
        raise ValueError(
            "backward_passes_per_step does not go with gradient_accumulation_steps, nor with an "
            "optimizer that has been used"
        )
    steps.gradient_accumulation_steps = passes


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer like `DistributedOptimizer`, but leave some layers' gradients local.

    Args:
        optimizer: as the others, see `DistributedOptimizer`.
        local_layers: a layer, or several, which are built.

    Raises:
        ValueError: one of `local_layers` is no layer, or as for `DistributedOptimizer`.
    """
    layers = [] if local_layers is None else local_layers
    layers = [layers] if isinstance(layers, keras.layers.Layer) else layers
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError("local_layers must be layers of Keras")
    made = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            made.register_local_var(variable)
    return made
