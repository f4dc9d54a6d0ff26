"""Horovod's elastic interface for TensorFlow, in a world that is fixed (see core.elastic)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.core.context import shutdown
from hvdtrain.core.elastic import ObjectState, run
from hvdtrain.core.horovod_api import init, rank
from hvdtrain.errors import HorovodInternalError
from hvdtrain.tensorflow.functions import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

__all__ = [
    "HorovodInternalError",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "shutdown",
]


class TensorFlowState(ObjectState):
    """Variables and values that can be committed, restored and made equal on all ranks.

    Args:
        variables: by default all global ones of a graph of TensorFlow 1, where they must be
            initialised.
        session: of TensorFlow 1; by default the default session.
        kwargs: picklable objects, which become attributes.

    Raises:
        ValueError: in eager mode without variables, in a graph without a session.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        eager = tf.executing_eagerly()
        if variables is None:
            if eager:
                raise ValueError("TensorFlowState needs variables in eager mode")
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self.session = session or (None if eager else tf.compat.v1.get_default_session())
        if self.session is None and not eager:
            raise ValueError("TensorFlowState needs a session in a graph of TensorFlow 1")
        self._broadcast = None if eager else broadcast_variables(self.variables, root_rank=0)
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Copy the variables and values in memory (local)."""
        if self.session is None:
            self._saved_variables = [np.array(variable) for variable in self.variables]
        else:
            self._saved_variables = self.session.run(self.variables)
        super().save()

    def restore(self) -> None:
        """Go back to the last commit() or sync(), or else to the beginning (local)."""
        for variable, value in zip(self.variables, self._saved_variables, strict=True):
            if self.session is None:
                variable.assign(value)
            else:
                variable.load(value, self.session)
        super().restore()

    def sync(self) -> None:
        """Take rank 0's variables and values on every rank, and commit them (collective)."""
        if self.session is None:
            broadcast_variables(self.variables, root_rank=0)
        else:
            self.session.run(self._broadcast)
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """A model of Keras 3 or tf_keras, its optimizer, and values; in eager mode.

    Args:
        model: built; becomes the attribute `model`.
        optimizer: by default the one that the model is compiled with; becomes an attribute.
        backend: for Horovod's sake; of TensorFlow 1, and not needed.
        kwargs: picklable objects, which become attributes.

    Raises:
        ValueError: the model is not built, or there is no optimizer.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                "TensorFlowKerasState needs a model that is built: call model.build(input_shape)"
            )
        self.model, self.backend = model, backend
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if self.optimizer is None:
            raise ValueError(
                "TensorFlowKerasState needs an optimizer: give it one, or compile the model"
            )
        super().__init__([*model.variables, *_variables_of(self.optimizer, model)], **kwargs)


def _variables_of(optimizer: Any, model: Any) -> list[Any]:
    """Return the variables of an optimizer, all of which are made if they are not there yet."""
    if hasattr(optimizer, "_create_all_weights"):  # of tf_keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)
