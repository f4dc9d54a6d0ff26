"""Optimizer steps on the segments of one rank, with the compiled kernel (all local)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdtrain.core.sharding.kernel import KernelRule, KernelSegment, KernelUpdate, load_kernel


@dataclass(frozen=True)
class Form:
    """How a framework's own optimizers compute, which decides about the last bits."""

    contracts: bool
    width_bytes: int

    def rest(self, count: int, first: int, length: int, itemsize: int) -> int:
        """Return how many elements at the end of a segment are updated one by one.

        Args:
            itemsize: size of an element in bytes.
        """
        alone = count - count % (self.width_bytes // itemsize)
        return max(0, first + length - max(first, alone))


@dataclass(frozen=True)
class Scales:
    """Factors of the gradients of a step."""

    prescales: Sequence[float]
    postscale: float


@dataclass(frozen=True)
class Place:
    """Where a segment lies."""

    gradients: Sequence[int]
    weights: Sequence[int]
    count: int
    rest: int
    rule: int
    double: bool


class KernelStep:
    """Takes steps on segments, with the sums of their gradients, for all ranks of a node.

    Attributes:
        gradients: [segments, ranks] uint64, address of each rank's gradient; may be changed.
    """

    def __init__(self, places: Sequence[Place], ranks: int, own: int, form: Form) -> None:
        library = load_kernel()
        assert library is not None  # otherwise there is no form
        self._library, self._ranks, self._own = library, ranks, own
        shape = (len(places), ranks)
        self.gradients = np.array([p.gradients for p in places], np.uint64).reshape(shape)
        self._weights = np.array([p.weights for p in places], np.uint64).reshape(shape)
        self._segments = (KernelSegment * len(places))()
        for number, (segment, place) in enumerate(zip(self._segments, places, strict=True)):
            segment.gradients = self.gradients[number:].ctypes.data
            segment.weights = self._weights[number:].ctypes.data
            segment.count, segment.rest = place.count, place.rest
            segment.rule, segment.is_double = place.rule, place.double
        self._update = KernelUpdate(
            segments=ctypes.cast(self._segments, ctypes.POINTER(KernelSegment)),
            segment_count=len(places),
            copies=ranks,
            own=own,
            contracts=form.contracts,
        )

    def use_state(self, number: int, arrays: Sequence[int], steps: int) -> None:
        """Set where the state of a segment is."""
        segment = self._segments[number]
        for place, address in enumerate(arrays):
            segment.state[place] = address
        segment.steps = steps

    def set_sum(self, number: int, address: int) -> None:
        """Set where the reduced gradient of a segment is."""
        self.gradients[number, self._own] = address

    def select(self, number: int, used: bool, begins: bool) -> None:
        """Set what the next calls do with a segment."""
        self._segments[number].skipped = not used
        self._segments[number].begins = begins

    def update(
        self, rules: Sequence[KernelRule], scales: Scales | None, factor: float = 1.0
    ) -> None:
        """Update weights and state, and write the weights into the copies of all ranks."""
        kept = (KernelRule * len(rules))(*rules)
        self._update.rules = ctypes.cast(kept, ctypes.POINTER(KernelRule))
        self._update.factor = factor
        self._call("hvd_update", scales)

    def sum(self, scales: Scales | None) -> float:
        """Overwrite this rank's gradients with the scaled sums; return the sum of their squares."""
        self._call("hvd_sum", scales)
        total = 0.0
        for segment in self._segments:
            total += segment.squares
        return total

    def _call(self, name: str, scales: Scales | None) -> None:
        update = self._update
        update.gradient_count = 1 if scales is None else self._ranks
        factors: npt.NDArray[np.float64] = np.ones(self._ranks)
        update.postscale = 1.0
        if scales is not None:
            factors[:] = scales.prescales
            update.postscale = scales.postscale
        update.prescales = factors.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
        getattr(self._library, name)(update)
