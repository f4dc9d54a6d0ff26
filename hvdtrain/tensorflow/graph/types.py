"""Types of TensorFlow and Keras objects, for annotations.

TensorFlow has no type information, so that `tf.Tensor` is Any for a type checker.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray


def as_array(tensor: tf.Tensor) -> HostArray:
    """Return an eager tensor as an array: a view of host memory, else a copy."""
    if tensor.dtype == tf.bfloat16 or "CPU" not in tensor.backing_device:
        copied: HostArray = np.asarray(tensor.numpy())
        return copied
    return np.asarray(memoryview(tensor))


# A gradient as TensorFlow returns it: dense, sparse, or None where nothing depends on a variable.
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"

# Anything that tf.convert_to_tensor takes: tensors, variables, arrays, lists and numbers.
TensorLike: TypeAlias = "tf.types.experimental.TensorLike"


class Variable(Protocol):
    """A variable of TensorFlow, Keras 3 or tf_keras."""

    @property
    def dtype(self) -> tf.DType: ...

    @property
    def shape(self) -> tf.TensorShape: ...

    def assign(self, value: TensorLike) -> tf.Tensor | None:
        """Overwrite the variable; in a graph return the operation that does it."""


class Model(Protocol):
    """A model of Keras 3 or tf_keras."""

    built: bool

    @property
    def variables(self) -> list[Variable]: ...

    @property
    def trainable_variables(self) -> list[Variable]: ...
