"""Metrics of all ranks in the logs of `fit`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.core import objects

__all__ = ["MetricAverageCallback", "average"]

# A metric's value and how many samples it is of.
Weighted = tuple[float, float]


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace the logs of each epoch by their averages over the ranks, weighted by samples.

    Must come before callbacks that look at the logs: EarlyStopping, ReduceLROnPlateau and
    ModelCheckpoint then decide the same on every rank. A metric that some ranks lack is averaged
    over the others, and is in the logs of all. Averages are exact for means over samples.

    Args:
        device: makes no difference.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._training_samples: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget the last epoch."""
        self._training_samples = None

    def on_test_begin(self, logs: Any = None) -> None:
        """Remember how many samples were trained on, which validation is going to count over."""
        self._training_samples = self._samples()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place (collective)."""
        last = self._samples()
        trained = last if self._training_samples is None else self._training_samples
        own = {
            name: (float(value), last if name.startswith("val_") else trained)
            for name, value in (logs or {}).items()
        }
        averages = average(objects.allgather_object(own, "metrics of an epoch"))
        if logs is not None:
            logs.update(averages)

    def _samples(self) -> float:
        """Return how many samples the loss is the mean of since it was reset."""
        model: Any = self.model
        losses = [metric for metric in model.metrics if metric.name == "loss"]
        counts = [float(metric.count) for metric in losses if hasattr(metric, "count")]
        return counts[0] if counts and counts[0] > 0 else 1.0


def average(told: Sequence[Mapping[str, Weighted]]) -> dict[str, float]:
    """Return sum_r(n_r value_r) / sum_r(n_r) of each metric, over the ranks that have it."""
    names = dict.fromkeys(name for logs in told for name in logs)
    averages = {}
    for name in names:
        parts = [logs[name] for logs in told if name in logs]
        total = math.fsum(samples for _, samples in parts)
        averages[name] = math.fsum(value * samples for value, samples in parts) / total
    return averages
