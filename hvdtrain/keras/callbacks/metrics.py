"""The callback that averages metrics over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import keras

from hvdtrain.core import objects
from hvdtrain.keras.tensors.types import Logs, Model

__all__ = ["MetricAverageCallback", "average"]

# The value of a metric, and the number of samples that it is the mean of.
WeightedValue: TypeAlias = tuple[float, float]


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replace the logs of each epoch by their averages over the ranks, weighted by samples.

    It must come before callbacks that use the logs: EarlyStopping, ReduceLROnPlateau and
    ModelCheckpoint then decide the same on every rank. A metric that only some ranks have is
    averaged over them, and is logged on all ranks. Averages are exact for means over samples.

    Args:
        device: ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._training_samples: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Forget the last epoch.

        Args:
            epoch: number of the epoch.
            logs: metrics.
        """
        self._training_samples = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Remember the number of training samples, before validation resets it."""
        self._training_samples = self._samples()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Average the logs over the ranks (collective).

        Args:
            epoch: number of the epoch.
            logs: metrics, changed in place.
        """
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
        """Return the number of samples that the loss is the mean of."""
        model: Model = self.model
        losses = [metric for metric in model.metrics if metric.name == "loss"]
        counts = [float(metric.count) for metric in losses if hasattr(metric, "count")]
        return counts[0] if counts and counts[0] > 0 else 1.0


def average(logs_of_ranks: Sequence[Mapping[str, WeightedValue]]) -> dict[str, float]:
    """Return sum_r(n_r value_r) / sum_r(n_r) of each metric, over the ranks that have it."""
    names = dict.fromkeys(name for logs in logs_of_ranks for name in logs)
    averages = {}
    for name in names:
        parts = [logs[name] for logs in logs_of_ranks if name in logs]
        total = math.fsum(samples for _, samples in parts)
        averages[name] = math.fsum(value * samples for value, samples in parts) / total
    return averages
