"""Sums of losses and metrics while Keras trains or evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.collective import collective
from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import Counts, Totals

# Each update of these adds sums over the batch to their variables, which start at zero.
_SUMMABLE = (
    keras.metrics.Mean,  # the base of accuracies, errors, losses and similarities
    keras.metrics.Sum,
    keras.metrics.TruePositives,
    keras.metrics.TrueNegatives,
    keras.metrics.FalsePositives,
    keras.metrics.FalseNegatives,
    keras.metrics.Precision,
    keras.metrics.Recall,
    keras.metrics.SensitivityAtSpecificity,
    keras.metrics.SpecificityAtSensitivity,
    keras.metrics.PrecisionAtRecall,
    keras.metrics.RecallAtPrecision,
    keras.metrics.AUC,
    keras.metrics.FBetaScore,
    keras.metrics.IoU,
)


def require_adding_metrics(metrics: Mapping[str, Any]) -> None:
    """Check that the variables of metrics can be summed over ranks."""
    for name, metric in metrics.items():
        if not isinstance(metric, _SUMMABLE) and not getattr(metric, "adds_up", False):
            raise UsageError(
                f"metric {name!r} is a {type(metric).__name__}, whose variables are not known to "
                "add up over ranks: derive it from keras.metrics.Mean, or, if each update only "
                "adds sums over the batch to them, give its class the attribute adds_up = True"
            )


def sum_over_samples(loss: Any) -> Any:
    """Return a loss like this one that sums over samples, each times its sample_weight."""
    return type(loss).from_config({**loss.get_config(), "reduction": "sum"})


class KerasMetricSums(keras.metrics.Metric):  # type: ignore[misc]
    """Adds up the losses of samples with a weight, their number, and metrics of them.

    A sample with a weight counts once, whatever the weight is.
    """

    def __init__(self, loss: Any, metrics: Mapping[str, Any]) -> None:
        require_adding_metrics(metrics)
        super().__init__(name="tally")
        self._loss = loss
        self._inner = list(metrics.values())
        self._names = list(metrics)
        self._sums = self.add_weight(shape=(2,), initializer="zeros", name="sums")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch.

        Args:
            y_true: targets, [n, ...].
            y_pred: outputs, [n, ...].
            sample_weight: weights, [n]; samples of weight 0 are padding.
        """
        ops = keras.ops
        # At least float32, so that sums of half types keep their precision.
        counted = ops.cast(ops.reshape(sample_weight, [-1]) > 0, self._sums.dtype)
        losses = self._loss(y_true, y_pred, sample_weight=counted)
        for metric in self._inner:
            metric.update_state(y_true, y_pred, sample_weight=counted)
        self._sums.assign_add(ops.stack([ops.cast(losses, self._sums.dtype), ops.sum(counted)]))

    def result(self) -> Any:
        """Return the number of samples."""
        return self._sums[1]

    def reset_state(self) -> None:
        """Reset all sums to zero."""
        self._sums.assign(keras.ops.zeros(self._sums.shape, self._sums.dtype))
        for metric in self._inner:
            metric.reset_state()

    @collective
    def reduce(self) -> Totals:
        """Return the sums over all ranks."""
        arrays = [_flat([self._sums]), *(_flat(metric.variables) for metric in self._inner)]
        sums = hvd.allreduce(np.concatenate(arrays), name="score", op=hvd.Sum)
        (loss, samples), *counts = np.split(sums, np.cumsum([len(a) for a in arrays])[:-1])
        return Totals(int(samples), float(loss), dict(zip(self._names, counts, strict=True)))


class KerasMetricValue:
    """Computes a Keras metric from the sums of its variables."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self.higher_is_better = getattr(metric, "_direction", "up") != "down"

    def value(self, counts: Counts) -> Any:
        """Return the metric for sums of its variables, a number or a nested list."""
        if type(self._metric).result is keras.metrics.Mean.result:  # subclasses may take its root
            total, count = counts
            return float(total / count) if count else 0.0
        before = [keras.ops.convert_to_numpy(v) for v in self._metric.variables]
        starts = np.cumsum([array.size for array in before])[:-1]
        for variable, part in zip(self._metric.variables, np.split(counts, starts), strict=True):
            variable.assign(part.reshape(tuple(variable.shape)))
        value = keras.ops.convert_to_numpy(self._metric.result()).tolist()
        for variable, array in zip(self._metric.variables, before, strict=True):
            variable.assign(array)
        return value


def _flat(variables: Any) -> Any:
    arrays = [keras.ops.convert_to_numpy(v).astype(np.float64).reshape(-1) for v in variables]
    return np.concatenate(arrays)
