"""What the ranks know together about a step, and whether their weights are equal."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import AgreedError
from hvdtrain.engines.communicator import Communicator
from hvdtrain.topology import format_ranks
from hvdtrain.types import ReduceOp

if TYPE_CHECKING:
    from hvdtrain.arrays import HostArray

_logger = logging.getLogger("hvdtrain")

# Compared of each parameter: weights that differ do so nearly everywhere.
MOST_ELEMENTS = 1 << 14
_PERIOD = 1000
# Relative to the norm: processors of several kinds may round each step differently.
_TOLERANCE, _TOLERANCE_OF_HALF_TYPES = 1e-3, 0.1
# Radians of a difference that is just allowed. No fraction of the circle: weights that people set
# differ by round numbers, which must not be whole turns.
_ANGLE = 6.17e-3


def is_due(steps: int) -> bool:
    """Return whether weights are compared after so many steps: 1, 2, 4, 8 ... and each thousand."""
    # Not before the first one: programs may broadcast weights after it, as TensorFlow's do.
    return steps > 0 and (steps & (steps - 1) == 0 or steps % _PERIOD == 0)


@dataclass(frozen=True)
class WeightSums:
    """The sum of the elements of each parameter of a rank, and by how much it may differ."""

    names: Sequence[str]
    sums: Sequence[float]
    allowed: Sequence[float]

    @property
    def direction(self) -> tuple[float, float]:
        """A point on the unit circle, the same on ranks with equal weights."""
        pairs = zip(self.sums, self.allowed, strict=True)
        scaled = [(x, round(math.log2(most))) for x, most in pairs if most and math.isfinite(most)]
        # In units of powers of two, which seldom differ where weights differ by rounding. The power
        # itself tells weights from their double.
        total = sum(x / 2.0**power + 77 * power for x, power in scaled)
        return math.cos(_ANGLE * total), math.sin(_ANGLE * total)

    def differing(self, other: WeightSums) -> list[str]:
        """Return the names of the parameters that differ from another rank's."""
        rows = zip(self.names, self.sums, other.sums, self.allowed, strict=True)
        return [name for name, own, theirs, most in rows if abs(own - theirs) > most]


def sum_weights(rows: Iterable[tuple[str, HostArray, int]]) -> WeightSums:
    """Return the sums of parameters: names, first elements, and bytes of an element."""
    names, sums, allowed = [], [], []
    for name, elements, itemsize in rows:
        values = elements.astype(np.float64)
        names.append(name)
        with np.errstate(all="ignore"):  # weights that are not finite are left out
            sums.append(float(values.sum()))
            norm = float(np.linalg.norm(values))
        allowed.append(norm * (_TOLERANCE if itemsize > 2 else _TOLERANCE_OF_HALF_TYPES))
    return WeightSums(names, sums, allowed)


def _describe_differences(gathered: Sequence[WeightSums], ranks: Sequence[int]) -> str:
    """Return which weights differ from the first rank's, and where; "" for none or no ranks."""
    found = [each.differing(gathered[0]) for each in gathered]  # of each rank
    names = next(filter(None, found), [])
    if not names:
        return ""
    others = [rank for rank, theirs in zip(ranks, found, strict=True) if theirs]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more} of {format_ranks(others)}, from rank {ranks[0]}'s"


def note_differences(weights: Sequence[WeightSums], channel: Channel, at: str) -> bool:
    """Log which weights of the ranks of a channel differ, if any do; return whether."""
    found = _describe_differences(weights, channel.ranks)
    if found and channel.communicator.rank == 0:
        _logger.warning(
            f"weights differ between ranks {at}, so each rank trains a model of its own: {found}. "
            "Broadcast the initial weights from one rank; load states, change weights and set "
            "learning rates on all of them"
        )
    return bool(found)


def may_differ(ranks: int, x: float, y: float) -> bool:
    """Return whether some rank's direction is another one, from the sums over ranks."""
    return ranks - math.hypot(x, y) > _ANGLE**2 / 8


@dataclass(frozen=True)
class OwnStep:
    """What a rank knows about a step by itself when it submits it.

    Attributes:
        weight: weight of this rank in the average; None if it was given none.
        number: number of steps that the program has completed before, if it counts them.
        flush: whether this rank asks for equal weights now.
        local_steps: number of steps that it has taken since the weights of all were equal.
        rate, scale: as in StepInfo.
        variant: text that ranks compare with the plan, such as the gradients that were removed.
        joined: whether this rank has joined, and answers the others.
        weights: what ranks are to compare of their weights; None if that is not due.
    """

    weight: float | None = None
    number: int | None = None
    flush: bool = False
    local_steps: int = 1
    rate: float | None = None
    scale: float = 1.0
    variant: str = ""
    joined: bool = False
    weights: WeightSums | None = None


@dataclass(frozen=True)
class StepInfo:
    """Information about a step.

    Attributes:
        step: number of steps that the program has completed before; its mean over the ranks that
            have not joined, rounded, where they differ.
        size: number of ranks that take part.
        rate: learning rate, if the adapter knows it; only for an exchange with `uses_rate`.
        weight: weight of this rank in the average; 0 if it has joined.
        total: sum of the weights of all ranks.
        weighted: whether any rank was given a weight; otherwise the plain average is used.
        finite: whether all elements of the results are finite, known at the end of the step; only
            for an exchange with `checks_finite`.
        flush: whether all ranks asked for equal weights now, at whatever step they are.
        local_steps: number of steps that ranks have taken since the weights of all were equal,
            all ranks together; 0 in a flush of equal weights.
        scale: factor of the loss, and so of gradients; only for an exchange with `uses_scale`.
        unused: names of the parameters for which no rank had a gradient, whose results are not
            used; known at the end of the step, only for an exchange with `checks_finite`.
        whole: whether every rank takes a step of its own: none has joined, or asks for a flush.
        placed: whether every rank says where its gradients lie, and none has joined.
        filled: whether every rank had filled all buckets before, and none has joined.
        weights: what all ranks compare of their weights, by rank, if it seems to differ.
    """

    step: int
    size: int
    rate: float | None = None
    weight: float = 1.0
    total: float = 0.0
    weighted: bool = False
    finite: bool = True
    flush: bool = False
    local_steps: int = 1
    scale: float = 1.0
    unused: frozenset[str] = frozenset()
    whole: bool = True
    placed: bool = False
    filled: bool = False
    weights: Sequence[WeightSums] = ()

    @property
    def drifted(self) -> bool:
        """Whether any rank has taken a step since the weights of all were equal."""
        return self.local_steps > 0

    def weigh(self, factor: float = 1.0) -> float:
        """Return `factor` times the weight of this rank's elements.

        With these factors, the sum over the ranks divided by `size` is the average.

        Raises:
            AgreedError: the weights of all ranks are zero.
        """
        if not self.weighted:
            return factor
        if self.total <= 0.0:
            raise AgreedError(
                ValueError("no rank has samples: the sample weights of all ranks are zero")
            )
        # Equal weights give the factor 1, and then the sum divided by the number of ranks.
        return factor * self.weight * self.size / self.total


@dataclass(frozen=True)
class LocalSteps:
    """The steps that a rank has taken by itself since weights were last exchanged.

    Ranks take steps at the same time, so these are equal on all ranks, except while a rank skips
    steps.

    Attributes:
        number: number of these steps, at least 1.
        samples: mean number of samples of all ranks in a step, equal on all ranks; None if ranks
            were given no sample weights, or the exchange has not set `counts_samples`.
        total: number of steps that the program has completed.
        rate: learning rate, if the adapter knows it.
        whole: whether every rank took part in the last step, the same on all ranks.
    """

    number: int
    samples: float | None
    total: int
    rate: float | None
    whole: bool = True


@collective
def agree_on_step(own: OwnStep, placed: bool, filled: bool, communicator: Communicator) -> StepInfo:
    """Return what the ranks know together about a step."""
    weight, given = 1.0 if own.weight is None else own.weight, own.weight is not None
    compared = (False, 0.0, 0.0) if own.weights is None else (True, *own.weights.direction)
    known = (
        *(weight, given, not own.flush, own.local_steps, True, own.number or 0),
        *(placed, filled, *compared),
    )
    sums = np.array(known, np.float64) * (not own.joined)
    communicator.allreduce(Buffer.from_array(sums), ReduceOp.SUM)
    total, weighted, others, steps, present, done, *all_of, all_compared, x, y = sums.tolist()
    size, gathered = communicator.size, list[WeightSums]()
    if own.weights is not None and all_compared == size and may_differ(size, x, y):
        gathered = communicator.gather_objects(own.weights)
    return StepInfo(
        step=round(done / max(1, present)),
        size=size,
        rate=own.rate,
        weight=0.0 if own.joined else weight,
        total=total,
        weighted=bool(weighted),
        flush=not others,
        local_steps=int(steps),
        scale=own.scale,
        whole=others == size,
        placed=all_of[0] == size,
        filled=all_of[1] == size,
        weights=gathered,
    )


class StepCounter:
    """Counts the steps of this rank, and their samples, since weights were exchanged."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples_per_step: float | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Note that the weights of all ranks are equal now."""
        self.begun = False
        self._since_exchange = self.local_steps = 0
        self.samples = 0.0

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all were equal."""
        return self.local_steps == 0

    def check_synchronized(self, caller: str) -> None:
        if not self.synchronized:
            raise RuntimeError(
                "the ranks' weights differ until their next exchange: call flush() before "
                f"{caller}()"
            )

    def count(self, samples: float | None, rate: float | None) -> LocalSteps:
        """Count a step; return what tells an exchange whether it is due."""
        self.steps += 1
        self._since_exchange += 1
        self.local_steps += 1
        self.samples += 1.0 if samples is None else samples
        return LocalSteps(self._since_exchange, self.samples_per_step, self.steps, rate)

    def end_exchange(self, info: StepInfo, partial: bool, counts_samples: bool) -> None:
        if counts_samples and info.total:
            # Without any step the samples are those of the first one.
            self.samples_per_step = info.total * info.size / (info.local_steps or info.size)
        self._since_exchange = 0
        if info.flush or not partial:
            self.begin_anew()
