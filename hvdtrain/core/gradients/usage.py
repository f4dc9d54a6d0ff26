"""Which gradients each rank has in a step, as integers that ranks sum at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


def unused_names(names: Sequence[str], sums: Sequence[int]) -> frozenset[str]:
    """Return the names of the parameters for which no rank had a gradient, if ranks told."""
    if len(sums) != usage_length(len(names)) or not sums[-2]:  # none has called write_usage()
        return frozenset()
    return frozenset(name for name, count in zip(names, sums, strict=False) if not count)


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
    used, kinds, positions = np.split(numbers[:-2], 3)
    used[:] = 1
    used[list(absent)] = 0
    kinds[list(sparse)] = 1
    if arrivals is not None:
        positions[:] = len(positions)
        positions[arrivals] = range(len(arrivals))
    numbers[-2:] = 1, outdated


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
