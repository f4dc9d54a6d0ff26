"""DistributedOptimizer, with Horovod's arguments, and saved models that have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

import keras

from hvdtrain.core.compression import Compressor
from hvdtrain.core.gradient_settings import GradientSettings, Groups, choose_exchange, choose_groups
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.keras.backends.distributed import GradientReduction, current_backend, distribute
from hvdtrain.keras.backends.operations import Compression
from hvdtrain.keras.fitting import hook_models
from hvdtrain.types import ReduceOp


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
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
    exchange: Exchange | str | None = None,
    sharded: bool = False,
) -> keras.optimizers.Optimizer:
    """Return an optimizer of Keras 3 that reduces gradients over the ranks (local).

    It is of a subclass of the optimizer's class, shares its variables, and is for `compile` or a
    loop of your own; do not use the original any more. Clipping, weight decay, averages of weights
    and accumulation see the reduced gradients.

    Args:
        optimizer: optimizer of keras.optimizers, a LossScaleOptimizer included.
        name: operation name; by default DistributedOptimizer_gradients.
        device_dense: ignored.
        device_sparse: ignored.
        compression: Compression.fp16 or bf16, equivalent to exchange="half:type=fp16" or bf16.
        sparse_as_dense: make tf.IndexedSlices dense instead of gathering the slices.
        gradient_predivide_factor: divisor of gradients before the sum of an average, which is
            divided by size / gradient_predivide_factor.
        op: Average or Sum.
        num_groups: deprecated; a number as `groups`.
        groups: number of groups that are reduced together, or lists of variables.
        backward_passes_per_step: number of passes whose gradients are added up before an update.
            It sets Keras's gradient_accumulation_steps, with the sum in place of the average.
        average_aggregated_gradients: take the average instead of that sum.
        process_set: ranks that take part; other ranks apply their own gradients.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        exchange: exchange that replaces op and compression, of dense gradients or of weights after
            local steps: text such as "half:type=bf16" or "local:steps=4", or an object that only
            this optimizer uses.
        sharded: let the ranks of a node share the optimizer's work and state (docs/sharded.md).

    Raises:
        TypeError: `exchange` is neither an exchange nor text, or `process_set` no process set.
        ValueError: the optimizer is distributed already, or arguments are invalid or exclude each
            other.
        UnsupportedError: the optimizer, the backend or a setting does not go with `sharded`.
        UsageError: Keras runs on a backend that hvdtrain does not support.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"op must be Average or Sum, got {op!r}")
    kind = Compression.name_of(compression)
    if kind == "own":
        raise ValueError(
            f"compression must be Compression.none, fp16 or bf16, got {compression!r}: write an "
            "exchange for another (docs/exchanges.md)"
        )
    settings = GradientSettings(
        op,
        process_set,
        gradient_predivide_factor,
        choose_groups(num_groups, groups),
        sparse_as_dense,
        choose_exchange(exchange, op, gradient_predivide_factor, kind),
        current_backend().allocator,
    )
    hook_models()
    passes = backward_passes_per_step
    reduction = GradientReduction(
        settings,
        name or "DistributedOptimizer_gradients",
        1.0 if average_aggregated_gradients else float(passes),
        scale_local_gradients,
        sharded,
    )
    if sharded and passes != 1:
        raise ValueError("sharded=True needs backward_passes_per_step=1")
    distributed = distribute(optimizer, reduction)
    if passes != 1:
        _accumulate(distributed, passes)
    return distributed


def _accumulate(optimizer: keras.optimizers.Optimizer, passes: int) -> None:
    """Make an optimizer update its variables once in several passes."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
    if hasattr(inner, "optimizers"):
        raise ValueError(
            "a MultiOptimizer does not accumulate gradients: leave out backward_passes_per_step, "
            "and give the optimizers in it gradient_accumulation_steps"
        )
    if inner.gradient_accumulation_steps or inner.built:
        raise ValueError(
            "backward_passes_per_step cannot be combined with gradient_accumulation_steps, or with "
            "an optimizer that has been used"
        )
    inner.gradient_accumulation_steps = passes


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Sequence[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Return a DistributedOptimizer that does not reduce the gradients of some layers (local).

    Args:
        optimizer: optimizer; this and all other arguments are those of `DistributedOptimizer`.
        local_layers: layer, or several, which must be built.

    Raises:
        ValueError: `local_layers` holds something else, or see `DistributedOptimizer`.
    """
    layers = [] if local_layers is None else local_layers
    layers = [layers] if isinstance(layers, keras.layers.Layer) else layers
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError("local_layers must be Keras layers")
    distributed = DistributedOptimizer(
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
            distributed.register_local_var(variable)
    return distributed


def load_model(
    filepath: str | PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, object] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model and make its optimizer, with its state, a DistributedOptimizer (local).

    Args:
        filepath: file that `model.save` wrote, with a DistributedOptimizer or without.
        custom_optimizers: optimizer classes that Keras does not have.
        custom_objects: further objects that Keras does not have, by name.
        compression: Compression.fp16 or bf16, equivalent to exchange="half:type=fp16" or bf16.
        legacy_opts: must be False; Horovod has the argument.

    Raises:
        ValueError: legacy_opts is True, or see keras.saving.load_model.
    """
    if legacy_opts:
        raise ValueError("legacy_opts: Keras 3 has no legacy optimizers")
    known = {kind.__name__: kind for kind in custom_optimizers or []} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        if keras.backend.backend() == "tensorflow":
            model.jit_compile = False  # as `compile` sets it
    return model
