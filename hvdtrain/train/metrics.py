"""Sums over samples and ranks, and the means and metrics computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["Accuracy", "ConfusionMatrix", "Gathered", "MeanOf", "Metric", "TopK"]

Counts = npt.NDArray[np.float64]


class Metric(Protocol):
    """A metric computed from sums over the samples of all batches and ranks.

    Attributes:
        higher_is_better: whether higher values are better; None if the value does not rank models.
    """

    higher_is_better: bool | None

    def counts(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the counts of a batch, float64 [n] with the same n for every batch (local).

        Args:
            outputs: outputs of the model, [samples, ...].
            targets: targets, [samples, ...].
        """

    def value(self, counts: Counts) -> float | list[Any]:
        """Return the value for the sum of counts() over all samples; NaN for no samples."""


class _Mean:
    """A metric whose counts are a sum and the number of its terms."""

    def value(self, counts: Counts) -> float:
        """Return sum / number; NaN if there are none."""
        total, number = counts.tolist()
        return total / number if number else float("nan")


class Accuracy(_Mean):
    """The fraction of targets whose class has the highest score."""

    higher_is_better: bool | None = True

    def counts(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return [hits, targets].

        Args:
            outputs: scores, [n, classes, ...].
            targets: int64 classes, [n, ...].
        """
        hits = outputs.argmax(dim=1) == targets
        return _sum_and_number(hits)


class TopK(_Mean):
    """The fraction of targets whose class is among those with the k highest scores.

    Among equal scores, those of lower classes rank higher, so that a model which gives all classes
    the same score is no better than chance. A score of NaN is never a hit.

    Args:
        k: number of classes, at least 1 and less than all.

    Raises:
        UsageError: k is less than 1.
    """

    higher_is_better: bool | None = True

    def __init__(self, k: int) -> None:
        if k < 1:
            raise UsageError(f"TopK: k must be at least 1, got {k}")
        self.k = k

    def counts(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return [hits, targets].

        Args:
            outputs: scores, [n, classes, ...].
            targets: int64 classes, [n, ...].

        Raises:
            UsageError: there are not more than k classes.
        """
        import torch

        classes = outputs.shape[1]
        if classes <= self.k:
            raise UsageError(f"TopK({self.k}) of {classes} classes: all would be hits; lower k")
        own = outputs.gather(1, targets.unsqueeze(1))
        number = torch.arange(classes, device=outputs.device)
        earlier = number.reshape(-1, *[1] * (targets.ndim - 1)) < targets.unsqueeze(1)
        higher = ((outputs > own) | ((outputs == own) & earlier)).sum(dim=1)
        return _sum_and_number((higher < self.k) & ~own.squeeze(1).isnan())


class ConfusionMatrix:
    """The number of targets of each class that were predicted as each class.

    Args:
        classes: number of classes.

    Raises:
        UsageError: classes is less than 1.
    """

    higher_is_better: bool | None = None

    def __init__(self, classes: int) -> None:
        if classes < 1:
            raise UsageError(f"ConfusionMatrix: classes must be at least 1, got {classes}")
        self.classes = classes

    def counts(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the matrix, flattened.

        Args:
            outputs: scores, [n, classes, ...].
            targets: int64 classes, [n, ...].

        Raises:
            UsageError: outputs or targets have other classes.
        """
        import torch

        if outputs.shape[1] != self.classes:
            raise UsageError(
                f"ConfusionMatrix({self.classes}): the model gives {outputs.shape[1]} scores"
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < self.classes:
            raise UsageError(
                f"ConfusionMatrix({self.classes}): targets from {int(targets.min())} to "
                f"{int(targets.max())}, expected 0 to {self.classes - 1}"
            )
        cells = targets * self.classes + outputs.argmax(dim=1)
        return torch.bincount(cells.flatten(), minlength=self.classes**2).double()

    def value(self, counts: Counts) -> list[list[int]]:
        """Return the matrix, [targets, predictions]."""
        matrix: list[list[int]] = counts.reshape(self.classes, -1).astype(np.int64).tolist()
        return matrix


class MeanOf(_Mean):
    """The mean over samples of a user's function.

    Args:
        function: returns one number for each sample, [samples], from outputs [samples, ...] and
            targets [samples, ...].
        higher_is_better: whether higher values are better; None if the value does not rank models.
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        higher_is_better: bool | None = False,
    ) -> None:
        self._function = function
        self.higher_is_better = higher_is_better

    def counts(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return [sum, samples].

        Args:
            outputs: outputs of the model, [samples, ...].
            targets: targets, [samples, ...].

        Raises:
            UsageError: the function did not return one number for each sample.
        """
        values = self._function(outputs, targets)
        if tuple(values.shape) != (len(targets),):
            raise UsageError(
                f"MeanOf: the function must return one number for each of {len(targets)} samples, "
                f"got shape {tuple(values.shape)}"
            )
        return _sum_and_number(values)


class Gathered:
    """A function of all outputs and targets at once, such as the area under a curve.

    While it is computed, every rank holds the outputs and targets of all ranks.

    Args:
        function: returns the value from outputs [samples, ...] and targets [samples, ...] of all
            samples, as numpy arrays in the order of the data set.
        higher_is_better: whether higher values are better; None if the value does not rank models.
    """

    def __init__(
        self,
        function: Callable[[npt.NDArray[Any], npt.NDArray[Any]], float],
        higher_is_better: bool | None = True,
    ) -> None:
        self._function = function
        self.higher_is_better = higher_is_better

    def value(self, outputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> float:
        """Return the value for all samples (local).

        Args:
            outputs: outputs of the model, [samples, ...].
            targets: targets, [samples, ...].
        """
        return float(self._function(outputs, targets))


def _sum_and_number(values: torch.Tensor) -> torch.Tensor:
    total = values.detach().double().sum()
    counts = total.new_full((2,), values.numel())
    counts[0] = total
    return counts


# A number or, for a confusion matrix for example, a nested list of numbers.
MetricValue: TypeAlias = "float | Sequence[MetricValue]"
# The loss and the metrics by name.
Values = dict[str, MetricValue]


class RatedMetric(Protocol):
    """A metric whose values can be compared."""

    @property
    def higher_is_better(self) -> bool | None:
        """Whether higher values are better; None if the value does not rank models."""


class SummedMetric(RatedMetric, Protocol):
    """A metric computed from sums over samples and ranks."""

    def value(self, counts: Counts) -> MetricValue:
        """Return the value for sums over all samples, float64 [n]."""


@dataclass(frozen=True)
class Totals:
    """Sums over samples of all ranks."""

    samples: int = 0
    loss: float = 0.0
    counts: Mapping[str, Counts] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        counts = dict(self.counts)
        for name, added in other.counts.items():
            counts[name] = counts[name] + added if name in counts else added
        return Totals(self.samples + other.samples, self.loss + other.loss, counts)

    def values(self, metrics: Mapping[str, SummedMetric]) -> Values:
        """Return the mean loss, and the metrics that have counts."""
        values: Values = {"loss": self.loss / self.samples}
        for name, counts in self.counts.items():
            values[name] = metrics[name].value(np.asarray(counts))
        return values


def improved(
    value: float, best: float | None, name: str, metrics: Mapping[str, RatedMetric]
) -> bool:
    """Return whether a value is better than the best one before it.

    Lower is better for the loss, and for metrics whose higher_is_better is False. A value that is
    not finite is never better.
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value > best if _higher_is_better(name, metrics) else value < best


def require_known(name: str, metrics: Mapping[str, RatedMetric]) -> None:
    """Check, before the first evaluation, that it will have the value that decides."""
    known = [one for one in ("loss", *metrics) if _higher_is_better(one, metrics) is not None]
    if name not in known:
        raise _unknown(name, known)


def require_number(values: Values, name: str, metrics: Mapping[str, RatedMetric]) -> float:
    """Return the value that decides which evaluation is best."""
    numbers = {
        known: float(value)
        for known, value in values.items()
        if isinstance(value, (int, float)) and _higher_is_better(known, metrics) is not None
    }
    if name not in numbers:
        raise _unknown(name, list(numbers))
    return numbers[name]


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    return UsageError(
        f"--best {name}: an evaluation has nothing of that name which can be better or worse: "
        f"choose from {', '.join(known)}"
    )


def _higher_is_better(name: str, metrics: Mapping[str, RatedMetric]) -> bool | None:
    return False if name == "loss" else metrics[name].higher_is_better
