"""Values of Keras as numpy arrays."""

from __future__ import annotations

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.keras.tensors.types import Value


def to_array(value: Value) -> HostArray:
    """Return a value as a contiguous array of the same shape, 0-d for a number."""
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    array: HostArray = np.asarray(value)
    return np.ascontiguousarray(array).reshape(array.shape)  # which makes 0-d arrays 1-d
