"""A shard of the weights on a server, with the recipe's own Keras optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.train.keras.shards.optimizer_state import BuiltOptimizer
from hvdtrain.train.parameter_server.shards import Piece
from hvdtrain.train.parameter_server.states import Outline
from hvdtrain.train.parameter_server.wire import Flat


class KerasShard:
    """A shard whose variables are pieces of the model's, in host memory."""

    def __init__(
        self,
        optimizer: Any,
        set_step: Callable[[int], None],
        whole: BuiltOptimizer,
        pieces: Sequence[Piece],
        flat: Flat,
    ) -> None:
        self._optimizer, self._set_step, self._whole = optimizer, set_step, whole
        self._pieces, self.weights = list(pieces), flat
        with keras.device("cpu"):
            self._variables = [
                keras.Variable(_part(flat, piece), dtype=flat.dtype.name, trainable=False)
                for piece in self._pieces
            ]
            self._exclude_from_weight_decay()
            self._own = BuiltOptimizer(optimizer, self._variables)

    def _exclude_from_weight_decay(self) -> None:
        """Take over which variables do not decay; Keras tells them by name or identity."""
        excluded = [
            variable
            for piece, variable in zip(self._pieces, self._variables, strict=True)
            if not self._whole.optimizer._use_weight_decay(self._whole.variables[piece.parameter])
        ]
        self._optimizer.exclude_from_weight_decay(var_list=excluded)

    def step(self, gradient: Flat, number: int) -> None:
        """Step the optimizer; see Shard.step."""
        if not self._pieces:
            return
        self._set_step(number)
        with keras.device("cpu"):
            parts = [_part(gradient, piece) for piece in self._pieces]
            self._optimizer.apply([keras.ops.convert_to_tensor(part) for part in parts])
        for piece, variable in zip(self._pieces, self._variables, strict=True):
            self.weights[_span(piece)] = keras.ops.convert_to_numpy(variable)

    def load_state(self) -> None:
        """Take the shard's weights, and its part of the state of the whole optimizer."""
        for number, piece in enumerate(self._pieces):
            self._variables[number].assign(_part(self.weights, piece))
            for name, slot in self._own.slots[number].items():
                whole = keras.ops.convert_to_numpy(self._whole.slots[piece.parameter][name])
                slot.assign(whole.reshape(-1)[piece.begin : piece.begin + piece.count].copy())
        for own, whole in zip(self._own.others, self._whole.others, strict=True):
            own.assign(_copy(whole))

    def outline(self) -> Outline:
        """Return each piece with its state."""
        others = {str(number): _copy(variable) for number, variable in enumerate(self._own.others)}
        return [
            (piece, others | {name: np.dtype(slot.dtype) for name, slot in slots.items()})
            for piece, slots in zip(self._pieces, self._own.slots, strict=True)
        ]

    def write_state(self, name: str, flat: Flat) -> None:
        """Write an elementwise state of all pieces; see ShardState.write_state."""
        for piece, slots in zip(self._pieces, self._own.slots, strict=True):
            flat[_span(piece)] = keras.ops.convert_to_numpy(slots[name])


def _span(piece: Piece) -> slice:
    return slice(piece.start, piece.start + piece.count)


def _part(flat: Flat, piece: Piece) -> Flat:
    """Return a copy of a piece's elements, because backends may keep the memory."""
    return flat[_span(piece)].copy()


def _copy(variable: Any) -> HostArray:
    return np.array(keras.ops.convert_to_numpy(variable))
