"""tf.GradientTape whose gradients are reduced over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.core.compression import Compressor
from hvdtrain.core.gradient_settings import Groups, choose_groups
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.gradients import VariableReduction
from hvdtrain.tensorflow.graph import Gradient, Variable, do_not_convert
from hvdtrain.types import ReduceOp

# Variables, and their gradients, in lists, tuples and dictionaries.
Sources: TypeAlias = "Variable | Sequence[Sources] | Mapping[str, Sources]"
Gradients: TypeAlias = "Gradient | Sequence[Gradients] | Mapping[str, Gradients]"


class _TapeMixin:
    """Base class of distributed tapes, before the class of the tape."""

    _reduction: VariableReduction

    def register_local_source(self, source: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._reduction.add_local(source)

    @do_not_convert
    @collective
    def gradient(
        self,
        target: tf.Tensor | Sequence[tf.Tensor],
        sources: Sources,
        output_gradients: Sequence[tf.Tensor] | None = None,
        use_generic_names: bool = False,
        **kwargs: Any,
    ) -> Gradients:
        """Return gradients reduced over the ranks; see tf.GradientTape.gradient."""
        own = super().gradient(target, sources, output_gradients, **kwargs)  # type: ignore[misc]
        reduced = self._reduction(tf.nest.flatten(own), tf.nest.flatten(sources))
        if not isinstance(sources, list | tuple | dict):
            return reduced[0]
        packed: Gradients = tf.nest.pack_sequence_as(sources, reduced)
        return packed

    @do_not_convert
    @collective
    def get_local_and_global_gradients(
        self,
        target: tf.Tensor | Sequence[tf.Tensor],
        sources: Sequence[Variable],
        output_gradients: Sequence[tf.Tensor] | None = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Variable, Gradient]], list[tuple[Variable, Gradient]]]:
        """Return gradients of local variables and reduced gradients apart."""
        gradients: Any = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if self._reduction.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reduction.is_local(pair[0])]


@functools.cache
def _tape_class(kind: Any) -> Any:
    return type(f"Distributed{kind.__name__}", (_TapeMixin, kind), {})


@do_not_convert
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Return a tape with the recording of `gradtape` that reduces gradients over the ranks (local).

    Each call of its gradient() reduces all gradients as one operation. It works in eager mode and
    in tf.function, but not where XLA compiles the function.

    Args:
        gradtape: tape, which must not be used any more.
        device_dense: ignored.
        device_sparse: ignored.
        compression: compressor; Compression.fp16 and bf16 round what crosses the network.
        sparse_as_dense: make tf.IndexedSlices dense instead of gathering the slices.
        op: Average, Sum, or another reduction.
        gradient_predivide_factor: divisor of gradients before the sum of an average, which is
            divided by size / gradient_predivide_factor.
        num_groups: deprecated; a number as `groups`.
        groups: number of groups that are reduced together, or lists of variables.
        process_set: ranks that take part; other ranks keep their own gradients.
        scale_local_gradients: divide gradients of local variables by the number of ranks.

    Raises:
        TypeError: `process_set` is not a process set.
        ValueError: the tape is distributed already, or arguments exclude each other.
    """
    if isinstance(gradtape, _TapeMixin):
        raise ValueError("the tape is a DistributedGradientTape already")
    base: Any = type(gradtape)
    kind = _tape_class(base)
    tape = kind.__new__(kind)  # without __init__, which would start a new recording
    tape.__dict__.update(gradtape.__dict__)
    tape._recording = False  # if it is wrapped inside its `with`, that ends the user's tape
    tape._reduction = VariableReduction(
        "DistributedGradientTape",
        op,
        process_set,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        choose_groups(num_groups, groups),
        scale_local_gradients,
    )
    return tape


@do_not_convert
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: tf.keras.layers.Layer | Sequence[tf.keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Return a DistributedGradientTape that does not reduce the gradients of some layers (local).

    Args:
        gradtape: tape; this and all other arguments are those of `DistributedGradientTape`.
        local_layers: layer of tf.keras, or several.

    Raises:
        ValueError: `local_layers` holds something else, or see `DistributedGradientTape`.
    """
    layers = [] if local_layers is None else local_layers
    if isinstance(layers, tf.keras.layers.Layer):
        layers = [layers]
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in layers):
        raise ValueError("local_layers must be tf.keras layers")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
