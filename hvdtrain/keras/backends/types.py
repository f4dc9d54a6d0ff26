"""Types of Keras objects, for annotations: Keras has no type information."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np

from hvdtrain.arrays import HostArray

# The metrics of an epoch or batch, by name.
Logs: TypeAlias = dict[str, Any]


class BackendTensor(Protocol):
    """A tensor of the backend: an array of numbers, or a value of a function that is traced."""

    @property
    def shape(self) -> Sequence[int | None]: ...

    @property
    def dtype(self) -> Any: ...

    def __float__(self) -> float: ...


class KerasVariable(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def path(self) -> str: ...

    def assign(self, value: BackendTensor | HostArray) -> object:
        """Overwrite the variable."""


# What the operations take: a number, a list of numbers, an array, a tensor or a variable.
Value: TypeAlias = "float | Sequence[Value] | HostArray | BackendTensor | KerasVariable"


class KerasModel(Protocol):
    name: str
    optimizer: Any
    built: bool
    jit_compile: bool
    stop_training: bool
    train_step: Any
    train_function: Any
    _initial_epoch: Any

    @property
    def weights(self) -> list[KerasVariable]: ...

    @property
    def trainable_variables(self) -> list[KerasVariable]: ...

    @property
    def metrics(self) -> list[keras.metrics.Metric]: ...

    @property
    def dtype_policy(self) -> keras.DTypePolicy: ...

    def make_train_function(self, force: bool = False) -> Mapping[str, object]:
        """Make the function that trains on a batch."""

    def _flatten_layers(self) -> Iterable[keras.layers.Layer]: ...


def to_array(value: Value) -> HostArray:
    """Return a value as a contiguous array of the same shape, 0-d for a number."""
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    array: HostArray = np.asarray(value)
    return np.ascontiguousarray(array).reshape(array.shape)  # which makes 0-d arrays 1-d
