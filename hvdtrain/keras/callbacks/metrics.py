"""The callback that averages metrics over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context, objects
from hvdtrain.errors import MismatchError
from hvdtrain.keras.backends.types import KerasModel, Logs, to_array

__all__ = ["MetricAverageCallback"]

# The keys that lead to a metric, its value, and the number of samples that this is the mean of.
_Path: TypeAlias = tuple[Any, ...]
_Metrics: TypeAlias = dict[_Path, tuple[HostArray, float]]
_COMPLEX, _NO_NUMBERS = "c", "OSUMm"  # kinds of numpy


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replace the logs of each epoch by their averages over the ranks, weighted by samples.

    It must come before callbacks that use the logs: EarlyStopping, ReduceLROnPlateau and
    ModelCheckpoint then decide the same on every rank. A metric that only some ranks have is
    averaged over them, and is logged on all ranks. Arrays are averaged element by element, and
    numbers in dicts as others; what is no number stays that of the rank. Averages are exact for
    means over samples.

    Args:
        device: ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._training_samples: float | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Forget the last epoch."""
        self._training_samples = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Remember the number of training samples, before validation resets it."""
        self._training_samples = self._samples()

    @collective
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Average the logs over the ranks (collective)."""
        last = self._samples()
        trained = last if self._training_samples is None else self._training_samples
        own: _Metrics = {}
        for path, value in _numbers((), logs or {}):
            own[path] = value, last if str(path[0]).startswith("val_") else trained
        averages = _averages(objects.allgather_object(own, "metrics of an epoch"))
        for path, average in averages.items() if logs is not None else ():
            inner: Any = logs
            for key in path[:-1]:
                if not isinstance(inner.get(key), dict):
                    inner[key] = {}
                inner = inner[key]
            inner[path[-1]] = average

    def _samples(self) -> float:
        """Return the number of samples that the loss is the mean of."""
        model: KerasModel = self.model
        losses = [metric for metric in model.metrics if metric.name == "loss"]
        counts = [float(metric.count) for metric in losses if hasattr(metric, "count")]
        return counts[0] if counts and counts[0] > 0 else 1.0


def _numbers(path: _Path, value: Any) -> Iterator[tuple[_Path, HostArray]]:
    """Yield what can be averaged in a value, as float64 or complex128."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers((*path, key), item)
        return
    try:
        array = to_array(value)
        kind = array.dtype.kind
        if kind not in _NO_NUMBERS:  # others are types of ml_dtypes
            yield path, array.astype(np.complex128 if kind == _COMPLEX else np.float64)
    except (TypeError, ValueError, RuntimeError):  # as for lists of different lengths
        return


def _averages(metrics_of_ranks: Sequence[_Metrics]) -> dict[_Path, Any]:
    """Return sum_r(n_r value_r) / sum_r(n_r) of each metric, over the ranks that have it."""
    paths = dict.fromkeys(path for metrics in metrics_of_ranks for path in metrics)
    averages: dict[_Path, Any] = {}
    for path in paths:
        found = {
            rank: metrics[path] for rank, metrics in enumerate(metrics_of_ranks) if path in metrics
        }
        first = next(iter(found))
        for rank, (value, _) in found.items():
            if value.shape != found[first][0].shape:
                raise MismatchError(
                    f"{_title(path)} has shape {value.shape} on rank {rank}, but "
                    f"{found[first][0].shape} on rank {first}: log the same on every rank"
                )
        if any(other[: len(path)] == path for other in paths if other != path):
            raise MismatchError(
                f"{_title(path)} is a number on rank {first}, but a dict on another rank: log the "
                "same on every rank"
            )
        values, samples = zip(*found.values(), strict=True)
        average = np.average(np.stack(values), axis=0, weights=samples)
        averages[path] = average if average.ndim else average.item()
    return averages


def _title(path: _Path) -> str:
    title = context.current().topology.title
    return f"{title} MetricAverageCallback: metric {'/'.join(map(str, path))!r}"
