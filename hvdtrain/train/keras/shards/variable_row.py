"""The trained variables of a Keras model in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.train.parameter_server.row import ParameterRow
from hvdtrain.train.parameter_server.wire import Flat


class VariableRow(ParameterRow):
    """Copies of variables and gradients in host memory."""

    def __init__(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        sizes = [int(np.prod(variable.shape)) for variable in variables]
        super().__init__(sizes, [variable.dtype for variable in variables])
        self._variables, self._gradients = list(variables), list(gradients)

    def read_weights(self) -> None:
        self._read(self.weights, self._variables)

    def write_weights(self) -> None:
        for part, variable in zip(self._parts(self.weights), self._variables, strict=True):
            variable.assign(part.reshape(variable.shape).copy())  # backends may keep the memory

    def read_gradients(self) -> None:
        self._read(self.gradients, self._gradients)

    def _read(self, flat: Flat, variables: Sequence[Any]) -> None:
        for part, variable in zip(self._parts(flat), variables, strict=True):
            part[:] = keras.ops.convert_to_numpy(variable).reshape(-1)

    def _parts(self, flat: Flat) -> list[Flat]:
        return np.split(flat, np.cumsum(self.sizes)[:-1])
