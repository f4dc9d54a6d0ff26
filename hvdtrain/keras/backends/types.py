"""Names for annotations, of objects for which Keras has no type information, and their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from hvdtrain.arrays import HostArray

# The metrics of an epoch or batch, by name.
Logs: TypeAlias = dict[str, Any]
# A tensor of the backend: an array of numbers, or a value of a function that is traced.
BackendTensor: TypeAlias = Any
KerasVariable: TypeAlias = keras.Variable
# What the operations take: a number, a list of numbers, an array, a tensor or a variable.
Value: TypeAlias = "float | Sequence[Value] | HostArray | BackendTensor | KerasVariable"


def to_array(value: Value) -> HostArray:
    """Return a value as a contiguous array of the same shape, 0-d for a number."""
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    array: HostArray = np.asarray(value)
    return np.ascontiguousarray(array).reshape(array.shape)  # which makes 0-d arrays 1-d
