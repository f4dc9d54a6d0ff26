"""Horovod's elastic interface for TensorFlow (see hvdtrain.core.elastic)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.core.context import shutdown
from hvdtrain.core.elastic import ObjectState, run
from hvdtrain.core.horovod_api import init, rank
from hvdtrain.errors import HorovodInternalError
from hvdtrain.tensorflow.functions import (
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdtrain.tensorflow.graph import Model, Variable

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
    """Variables and values that can be committed, restored and synchronized (collective).

    Args:
        variables: variables of any shape and dtype; by default all global variables of a graph of
            TensorFlow 1, which must be initialized.
        session: session of TensorFlow 1; by default the default session.
        kwargs: picklable objects, which become attributes.

    Raises:
        ValueError: there are no variables in eager mode, or there is no session in a graph.
    """

    @collective
    def __init__(
        self,
        variables: Iterable[Variable] | None = None,
        session: tf.compat.v1.Session | None = None,
        **kwargs: Any,
    ) -> None:
        eager = tf.executing_eagerly()
        if variables is None:
            if eager:
                raise ValueError("TensorFlowState needs variables in eager mode")
            variables = tf.compat.v1.global_variables()
        self.variables = list(variables)
        self.session = session or (None if eager else tf.compat.v1.get_default_session())
        if self.session is None and not eager:
            raise ValueError(
                "TensorFlowState needs a session in a graph of TensorFlow 1: pass session="
            )
        self._broadcast = None if eager else broadcast_variables(self.variables, root_rank=0)
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Copy the variables and values in memory (local)."""
        if self.session is None:
            self._saved_variables = [np.array(variable.numpy()) for variable in self.variables]
        else:
            self._saved_variables = self.session.run(self.variables)
        super().save()

    def restore(self) -> None:
        """Restore the values of the last commit() or sync(), else the initial ones (local)."""
        for variable, value in zip(self.variables, self._saved_variables, strict=True):
            if self.session is None:
                variable.assign(value)
            else:
                variable.load(value, self.session)
        super().restore()

    @collective
    def sync(self) -> None:
        """Broadcast rank 0's variables and values, and commit them (collective)."""
        if self.session is None:
            broadcast_variables(self.variables, root_rank=0)
        else:
            self.session.run(self._broadcast)
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """A model of Keras 3 or tf_keras, its optimizer, and values, in eager mode.

    Args:
        model: model that is built; becomes the attribute `model`.
        optimizer: optimizer of the model; by default the one that it is compiled with. Becomes the
            attribute `optimizer`.
        backend: ignored.
        kwargs: picklable objects, which become attributes.

    Raises:
        ValueError: the model is not built, or there is no optimizer.
    """

    def __init__(
        self,
        model: Model,
        optimizer: tf.keras.optimizers.Optimizer | None = None,
        backend: object = None,
        **kwargs: Any,
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


def _variables_of(optimizer: tf.keras.optimizers.Optimizer, model: Model) -> list[Variable]:
    if hasattr(optimizer, "_create_all_weights"):  # of tf_keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)
