"""tf.GradientTape whose gradients are those of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.core.arguments import Groups, choose_groups
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.tensorflow.gradients.gradients import (
    GradientSettings,
    LocalVariables,
    reduce_gradients,
)
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.tensorflow.operations.compression import Compression, Compressor
from hvdtrain.types import ReduceOp

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed:
    """Goes before the class of a tape, and reduces what it yields."""

    _settings: GradientSettings
    _local: LocalVariables

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of a variable on its rank."""
        self._local.add(source)

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **unconnected: Any,
    ) -> Any:
        """Return the gradients of all ranks (collective); see tf.GradientTape.gradient.

        Args:
            target: differentiated.
            sources: variables, in any structure; equal on all ranks.
            output_gradients: as of tf.GradientTape.
            use_generic_names: makes no difference.
            unconnected: `unconnected_gradients`, as of tf.GradientTape.
        """
        own = super().gradient(target, sources, output_gradients, **unconnected)  # type: ignore[misc]
        variables = _flat(sources)
        reduced = reduce_gradients(
            _flat(own), variables, self._settings, self._local, "DistributedGradientTape"
        )
        return tf.nest.pack_sequence_as(sources, reduced) if _is_nested(sources) else reduced[0]

    @unconverted
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (variable, gradient) of local variables, and of the others (collective)."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if pair[0] in self._local]
        return local, [pair for pair in pairs if pair[0] not in self._local]


def _is_nested(structure: Any) -> bool:
    return isinstance(structure, list | tuple | dict)


def _flat(structure: Any) -> list[Any]:
    """Return the parts of lists, tuples and dictionaries; slices and variables are parts."""
    if isinstance(structure, dict):
        return [part for key in sorted(structure) for part in _flat(structure[key])]
    if isinstance(structure, list | tuple):
        return [part for each in structure for part in _flat(each)]
    return [structure]


@functools.cache
def _distributed(kind: Any) -> type:
    return type(f"Distributed{kind.__name__}", (_Distributed, kind), {})


@unconverted
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
) -> Any:
    """Return a tape with what `gradtape` has recorded, whose gradients are those of all ranks.

    All gradients of a call of gradient() are reduced in one step. In eager mode and in
    tf.function; not where XLA compiles.

    Args:
        gradtape: a tape, which is not used any more.
        device_dense: makes no difference.
        device_sparse: makes no difference.
        compression: how gradients are rounded before they are added.
        sparse_as_dense: make tf.IndexedSlices dense, instead of gathering the slices.
        op: Average, Sum, or another reduction.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum, and
            by size / it after.
        num_groups: deprecated; the same as a number for `groups`.
        groups: how many groups of gradients are reduced together, or lists of variables.
        process_set: the ranks that take part; others keep their own gradients.
        scale_local_gradients: divide gradients of local variables by the number of ranks.

    Raises:
        ValueError: the tape is distributed already, or arguments do not go together.
    """
    if isinstance(gradtape, _Distributed):
        raise ValueError("the tape is a DistributedGradientTape already")
    base: Any = type(gradtape)
    kind: Any = _distributed(base)
    tape = kind.__new__(kind)  # without beginning anew
    tape.__dict__.update(gradtape.__dict__)
    tape._recording = False  # wrapped within its `with`, it is the user's tape that ends there
    tape._settings = GradientSettings(
        op,
        process_set,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        choose_groups(num_groups, groups),
    )
    tape._local = LocalVariables(scale_local_gradients)
    return tape


@unconverted
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
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a DistributedGradientTape that leaves the gradients of some layers on their ranks.

    Args:
        gradtape: as the others, see `DistributedGradientTape`.
        local_layers: a layer of tf.keras, or several.

    Raises:
        ValueError: one of `local_layers` is no layer, or as for `DistributedGradientTape`.
    """
    layers = [] if local_layers is None else local_layers
    if isinstance(layers, tf.keras.layers.Layer):
        layers = [layers]
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in layers):
        raise ValueError("local_layers must be layers of tf.keras")
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
