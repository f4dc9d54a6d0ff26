"""The weights and the optimizer of a run with Keras or TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.train.course import Course
from hvdtrain.train.frameworks.protocol import Array
from hvdtrain.train.keras_recipe import KerasRecipe

__all__ = ["KerasState", "new_model"]

_LARGEST_SEED = 2**32


class KerasState:
    """A model of Keras and its optimizer, which is built.

    Args:
        model: whose weights count.
        optimizer: of its trainable ones.
    """

    suffix = "npz"

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer

    @property
    def variables(self) -> list[Any]:
        """All that is equal on all ranks."""
        return [*self._model.weights, *self._optimizer.variables]

    def weights(self) -> dict[str, Array]:
        """Return the weights by their paths."""
        return _arrays(self._model.weights)

    def content(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"model": self.weights(), "optimizer": _arrays(self._optimizer.variables)}

    def load(self, content: Mapping[str, Any]) -> None:
        """Take over what content() gave.

        Raises:
            ValueError, KeyError: it lacks a variable of the optimizer, or has another shape of it.
        """
        saved = content["optimizer"]
        for variable in self._optimizer.variables:
            shape = saved[variable.path].shape
            if shape != tuple(variable.shape):
                raise ValueError(f"its {variable.path} has shape {shape}")
        for variables, arrays in (
            (self._model.weights, content["model"]),
            (self._optimizer.variables, saved),
        ):
            for variable in variables:
                variable.assign(arrays[variable.path])


def new_model(recipe: KerasRecipe, course: Course) -> Any:
    """Build a model whose first weights differ between ranks (local).

    Rank 0's weights are the ones that count: others start elsewhere, so that a broadcast that went
    wrong shows in the digests.
    """
    keras.config.set_floatx(course.options.dtype)
    keras.config.set_dtype_policy(course.options.dtype)
    keras.utils.set_random_seed((course.options.seed + course.topology.rank) % _LARGEST_SEED)
    return recipe.build_model()


def _arrays(variables: Sequence[Any]) -> dict[str, Array]:
    return {v.path: keras.ops.convert_to_numpy(v) for v in variables}
