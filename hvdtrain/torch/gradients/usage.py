"""What ranks sum in addition to the gradients of a step: which gradients there are, in what order.

The numbers are one int32 array of length 3 P + 2 for P parameters: for each parameter whether this
rank has a gradient, whether it is sparse, and its position in the order of arrival; then 1 for the
rank itself, and whether its parameters no longer match the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def usage_length(parameters: int) -> int:
    """Return the length of the array for this number of parameters."""
    return 3 * parameters + 2


def write_usage(
    numbers: npt.NDArray[np.int32],
    absent: Iterable[int],
    sparse: Iterable[int],
    arrivals: Sequence[int] | None,
    outdated: bool,
) -> None:
    """Write the numbers of this rank."""
    used, kinds, positions = np.split(numbers[:-2], 3)
    used[:] = 1
    used[list(absent)] = 0
    kinds[list(sparse)] = 1
    if arrivals is not None:
        positions[:] = len(positions)
        positions[arrivals] = range(len(arrivals))
    numbers[-2:] = 1, outdated


def unused_names(names: Sequence[str], numbers: npt.NDArray[np.int32]) -> frozenset[str]:
    """Return the names of the parameters for which no rank had a gradient."""
    used = numbers[: len(names)].tolist()
    return frozenset(name for name, count in zip(names, used, strict=True) if not count)


@dataclass(frozen=True)
class StepUsage:
    """The sums over ranks; ranks that have joined contribute nothing."""

    used: list[int]
    sparse: list[int]
    positions: list[int]
    present: int
    outdated: int

    @property
    def unused(self) -> frozenset[int]:
        """The parameters for which some rank had no gradient."""
        return frozenset(i for i, count in enumerate(self.used) if count < self.present)

    @classmethod
    def from_sums(cls, numbers: list[int]) -> StepUsage:
        """Split the summed array into its parts."""
        *lists, present, outdated = numbers
        count = len(lists) // 3
        return cls(lists[:count], lists[count : 2 * count], lists[2 * count :], present, outdated)

    @property
    def with_dense(self) -> frozenset[int]:
        """The parameters of which some rank has a dense gradient."""
        pairs = enumerate(zip(self.used, self.sparse, strict=True))
        return frozenset(index for index, (used, sparse) in pairs if used > sparse)
