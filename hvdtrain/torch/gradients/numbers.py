"""What ranks add up beside the gradients of a step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Summed", "count_of", "note"]


def count_of(parameters: int) -> int:
    """Return how many numbers there are for so many parameters."""
    return 3 * parameters + 2


def note(
    numbers: npt.NDArray[np.int32],
    absent: Iterable[int],
    sparse: Iterable[int],
    arrivals: Sequence[int] | None,
    outgrown: bool,
) -> None:
    """Write this rank's numbers.

    Args:
        numbers: zeros.
        absent: indices of parameters for which this rank has no gradient.
        sparse: indices of those for which it has a sparse one.
        arrivals: the order in which gradients came, until a plan follows it.
        outgrown: the plan does not fit the parameters any more.
    """
    used, kinds, places = np.split(numbers[:-2], 3)
    used[:] = 1
    used[list(absent)] = 0
    kinds[list(sparse)] = 1
    if arrivals is not None:
        places[:] = len(places)
        places[arrivals] = range(len(arrivals))
    numbers[-2:] = 1, outgrown


@dataclass(frozen=True)
class Summed:
    """The numbers of all ranks; those that have joined count nowhere.

    Attributes:
        used: for each parameter how many ranks have a gradient.
        sparse: for each how many have a sparse one.
        places: for each its place in the order of gradients, added up.
        present: how many ranks there are.
        outgrown: on how many the plan does not fit any more.
    """

    used: list[int]
    sparse: list[int]
    places: list[int]
    present: int
    outgrown: int

    @classmethod
    def of(cls, numbers: list[int]) -> Summed:
        """Read them."""
        *lists, present, outgrown = numbers
        count = len(lists) // 3
        return cls(lists[:count], lists[count : 2 * count], lists[2 * count :], present, outgrown)
