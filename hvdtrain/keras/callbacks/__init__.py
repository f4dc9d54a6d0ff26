"""Horovod's callbacks for `fit` on several ranks, and RankZero."""

from __future__ import annotations

from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvdtrain.keras.callbacks.metrics import MetricAverageCallback
from hvdtrain.keras.callbacks.rank_zero import BestModelCheckpoint, RankZero

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "RankZero",
]
