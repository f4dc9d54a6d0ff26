"""The training state with Keras: weights, optimizer and random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.collective import collective
from hvdtrain.core.objects import broadcast_object
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary
from hvdtrain.train.loop.protocol import Array
from hvdtrain.train.loop.replica_check import array_checksum

_GENERATOR = "seed_generator_state"


@dataclass(frozen=True)
class KerasSnapshot:
    """The state at one moment."""

    saved: dict[str, Any]

    def content(self) -> dict[str, Any]:
        return self.saved


class KerasTrainingState:
    """A Keras model and its optimizer, which is built."""

    tensor_library: TensorLibrary = "np"

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer

    @property
    def variables(self) -> list[Any]:
        """All variables that are equal on all ranks."""
        return [*self._model.weights, *self._optimizer.variables]

    def weights(self) -> dict[str, Array]:
        return _arrays(self._model.weights)

    def reserve(self) -> None:
        """Do nothing: Keras returns new arrays for each snapshot."""

    def snapshot(self) -> KerasSnapshot:
        """Return the current state."""
        arrays = {"model": self.weights(), "optimizer": self.optimizer_state()}
        own = {part: {n: a.copy() for n, a in named.items()} for part, named in arrays.items()}
        return KerasSnapshot({**own, "counters": self.counters()})

    def settle(self) -> None:
        """Do nothing: a snapshot is complete when it is made."""

    @collective
    def average_statistics(self, ranks: int | None = None) -> None:
        """Average the weights that are not trained, such as running means."""
        ranks = hvd.size() if ranks is None else ranks
        for number, variable in enumerate(self._model.non_trainable_weights):
            array = keras.ops.convert_to_numpy(variable)
            if array.dtype.kind == "f":
                own = array.copy() if hvd.rank() < ranks else np.zeros_like(array)
                name, factor = f"statistics.{number}", 1 / ranks
                variable.assign(hvd.allreduce(own, name, op=hvd.Sum, postscale_factor=factor))

    def checksums(self, with_optimizer: bool = True) -> dict[str, int]:
        """Return the checksums of trained weights and optimizer variables by name.

        Others, such as the statistics of batch normalization, differ between ranks.
        """
        parts = {"weight": self._model.trainable_variables}
        if with_optimizer:
            parts["optimizer"] = self._optimizer.variables
        return {
            f"{part} {v.path!r}": array_checksum(keras.ops.convert_to_numpy(v))
            for part, variables in parts.items()
            for v in variables
        }

    def counters(self) -> list[int]:
        """Return the count of each SeedGenerator of the model, as Dropout has one."""
        return [int(keras.ops.convert_to_numpy(state)[1]) for state in self._generators()]

    @collective
    def broadcast_counters(self) -> None:
        """Copy the counters of rank 0 to every rank; each keeps its own seeds."""
        self._set_counters(broadcast_object(self.counters(), name="counters"))

    def load(self, content: Mapping[str, Any]) -> None:
        saved, counters = content["optimizer"], content["counters"]
        if len(counters) != len(self._generators()):
            raise ValueError(f"it has {len(counters)} random generators")
        for variable in self._optimizer.variables:
            shape = saved[variable.path].shape
            if shape != tuple(variable.shape):
                raise ValueError(f"its {variable.path} has shape {shape}")
        for variable in self._model.weights:
            variable.assign(content["model"][variable.path])
        self.load_optimizer(saved)
        self._set_counters(counters)

    def optimizer_state(self) -> dict[str, Array]:
        """Return the variables of the optimizer by their paths."""
        return _arrays(self._optimizer.variables)

    def load_optimizer(self, saved: Mapping[str, Array]) -> None:
        """Restore the variables of the optimizer."""
        for variable in self._optimizer.variables:
            variable.assign(saved[variable.path])

    def _generators(self) -> list[Any]:
        """Return the states [seed, counter] of the model's SeedGenerators, in the model's order."""
        return [v for v in self._model.variables if v.name == _GENERATOR]

    def _set_counters(self, counters: Sequence[int]) -> None:
        for state, counter in zip(self._generators(), counters, strict=True):
            array = keras.ops.convert_to_numpy(state).copy()
            array[1] = counter
            state.assign(array)


def _arrays(variables: Sequence[Any]) -> dict[str, Array]:
    return {v.path: keras.ops.convert_to_numpy(v) for v in variables}
