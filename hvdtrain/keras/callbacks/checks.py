"""Checks of a list of callbacks for use on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.keras.callbacks.learning_rate import LearningRateScheduleCallback
from hvdtrain.keras.callbacks.metrics import MetricAverageCallback
from hvdtrain.keras.callbacks.rank_zero import BestModelCheckpoint, SharedBackup

_COLLECTIVE = (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    MetricAverageCallback,
    SharedBackup,
)
_DECIDING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    BestModelCheckpoint,
)


def collective_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Return the class names of the callbacks that communicate, in their order."""
    return [type(callback).__name__ for callback in callbacks if isinstance(callback, _COLLECTIVE)]


def find_problem(callbacks: Sequence[keras.callbacks.Callback]) -> str | None:
    """Return the reason why these callbacks cannot work on several ranks, or None."""
    deciding = None
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            return (
                "BackupAndRestore would let each rank go on from an epoch of its own: use "
                "RankZero(BackupAndRestore(...)) on every rank"
            )
        if isinstance(callback, _DECIDING):
            deciding = type(callback).__name__
        if deciding is not None and isinstance(callback, MetricAverageCallback):
            return (
                f"{deciding} comes before MetricAverageCallback, so that each rank would decide "
                "on its own metrics: put MetricAverageCallback first"
            )
    return None
