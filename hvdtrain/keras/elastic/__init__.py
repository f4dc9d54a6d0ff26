"""Horovod's elastic interface for Keras 3, on its backends tensorflow, torch and jax."""

from __future__ import annotations

from hvdtrain.core.elastic import ObjectState, run
from hvdtrain.keras.elastic.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdtrain.keras.elastic.state import KerasState, TensorFlowKerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
