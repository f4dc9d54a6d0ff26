"""The compiled optimizer step, and the structures of update_kernel.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.compiled.library import load_or_report, open_library

_SOURCE = Path(__file__).with_name("update_kernel.c")
_MODULE = "hvdtrain.core.sharding._update_kernel"

KINDS = ("sgd", "adam", "adamw")


class KernelRule(Structure):
    """rule_t of update_kernel.c: the settings of a parameter group."""

    _fields_ = (
        ("lr", c_double),
        ("weight_decay", c_double),
        ("momentum", c_double),
        ("dampening", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("epsilon", c_double),
        ("kind", c_int32),  # as in KINDS
        ("maximize", c_int32),
        ("nesterov", c_int32),
        ("amsgrad", c_int32),
    )


class KernelSegment(Structure):
    """segment_t of update_kernel.c: elements of a parameter that this rank updates."""

    _fields_ = (
        ("gradients", c_uint64),
        ("weights", c_uint64),
        ("state", c_uint64 * 3),
        ("steps", c_uint64),
        ("squares", c_double),
        ("count", c_int64),
        ("rest", c_int64),
        ("rule", c_int32),
        ("is_double", c_int32),
        ("skipped", c_int32),
        ("begins", c_int32),
    )


class KernelUpdate(Structure):
    """update_t of update_kernel.c: an optimizer's step."""

    _fields_ = (
        ("segments", POINTER(KernelSegment)),
        ("segment_count", c_int64),
        ("rules", POINTER(KernelRule)),
        ("prescales", POINTER(c_double)),
        ("postscale", c_double),
        ("factor", c_double),
        ("gradient_count", c_int32),
        ("copies", c_int32),
        ("own", c_int32),
        ("contracts", c_int32),
        ("counted", c_int32),
        ("powers", c_int32),
        ("roots", c_void_p * 2),
    )


@cache
def load_kernel() -> ctypes.CDLL | None:
    """Return the library, or None if there is no usable one; the log says why."""
    without = "shared optimizer steps take several passes over memory"
    return load_or_report(_MODULE, _SOURCE.parent, open_kernel, without)


def open_kernel(path: Path | None) -> ctypes.CDLL:
    library = open_library(path, _SOURCE)
    for function in (library.hvd_update, library.hvd_sum, library.hvd_count):
        function.restype, function.argtypes = None, [POINTER(KernelUpdate)]
    return library


@dataclass(frozen=True)
class Form:
    """How a framework's own optimizers compute, which decides about the last bits.

    Without a width, all elements are computed in the same way. Roots are the addresses of functions
    for square roots of floats and of doubles, if those are not the processor's.
    """

    contracts: bool
    width_bytes: int
    roots: tuple[int, int] = (0, 0)

    def rest(self, count: int, first: int, length: int, itemsize: int) -> int:
        """Return how many elements at the end of a segment are updated one by one."""
        if not self.width_bytes:
            return 0
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


# A thread that has less to do takes longer to wake up than it saves.
_LEAST_OF_A_THREAD = 1 << 16


class TensorSteps:
    """Takes steps on whole tensors that have a state already.

    Args:
        places: of each parameter the addresses of its weights, of three arrays of its state, and of
            its steps, or 0; the number of its elements, that of its rule, and whether it is double.
        threads: number of threads.
    """

    def __init__(self, places: Sequence[Sequence[int]], threads: int) -> None:
        numbers = np.array(places, np.int64).reshape(-1, 8)
        counts, total = numbers[:, 5], int(numbers[:, 5].sum())
        self._bytes = counts * np.where(numbers[:, 7], 8, 4)
        lengths = np.stack([*[self._bytes] * 4, np.full_like(counts, 4)], axis=1)
        used = (numbers[:, :5] != 0) & (lengths > 0)
        written, lengths = numbers[:, :5][used], lengths[used]
        order = np.argsort(written)
        self._written, self._ends = written[order], np.append(0, (written + lengths)[order])
        self._apart = bool((self._ends[:-1] <= self._written).all())
        begins = np.cumsum(counts) - counts
        threads = max(1, min(threads, total // _LEAST_OF_A_THREAD))
        self._others = ThreadPoolExecutor(max(1, threads - 1), "hvdtrain-step")
        self._whole = _Part(numbers, np.zeros_like(counts), counts)
        self._parts = []
        for first, last in pairwise(total * number // threads for number in range(threads + 1)):
            starts = np.clip(first - begins, 0, counts)
            self._parts.append(_Part(numbers, starts, np.clip(last - begins, 0, counts) - starts))

    def are_apart(self, gradients: Sequence[int]) -> bool:
        """Return whether nothing else is in memory that a step writes."""
        first = np.array(gradients, np.int64)
        before = np.searchsorted(self._written, first + self._bytes)
        return self._apart and bool((self._ends[before] <= first).all())

    def take(self, gradients: Sequence[int], rules: Sequence[KernelRule], form: Form) -> None:
        """Take a step on the parameters whose gradients have an address that is not 0."""
        library, found = load_kernel(), np.array(gradients, np.uint64)
        assert library is not None  # otherwise there is no form
        kept = (KernelRule * len(rules))(*rules)
        if len(self._parts) == 1:
            library.hvd_update(self._whole.update(found, kept, form, counted=False))
            return
        library.hvd_count(self._whole.update(found, kept, form, counted=False))
        left = [part.update(found, kept, form, counted=True) for part in self._parts]

        def work() -> None:
            with suppress(IndexError):
                while True:
                    library.hvd_update(left.pop())

        running: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # no thread starts, as when the main thread has ended
                running.extend(self._others.submit(work) for _ in self._parts[1:])
            work()
        finally:
            wait(running)


class _Part:
    """The elements of each parameter that a thread updates."""

    def __init__(
        self, numbers: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], counts: Any
    ) -> None:
        offsets = (starts * np.where(numbers[:, 7], 8, 4)).astype(np.uint64)
        places = numbers[:, :4].astype(np.uint64)
        places[places != 0] += np.broadcast_to(offsets[:, None], places.shape)[places != 0]
        self._offsets, self._gradients = offsets, np.zeros(len(numbers), np.uint64)
        self._weights = places[:, 0].copy()
        self._segments = segments = np.zeros(len(numbers), np.dtype(KernelSegment))
        bytes_before = 8 * np.arange(len(numbers), dtype=np.uint64)
        segments["weights"] = bytes_before + np.uint64(self._weights.ctypes.data)
        segments["gradients"] = bytes_before + np.uint64(self._gradients.ctypes.data)
        segments["state"], segments["steps"] = places[:, 1:], numbers[:, 4]
        segments["count"], segments["rule"] = counts, numbers[:, 6]
        segments["is_double"] = numbers[:, 7]

    def update(
        self, gradients: npt.NDArray[np.uint64], rules: Any, form: Form, counted: bool
    ) -> KernelUpdate:
        self._gradients[:] = gradients + self._offsets
        self._segments["skipped"] = gradients == 0
        return KernelUpdate(
            segments=self._segments.ctypes.data_as(POINTER(KernelSegment)),
            segment_count=len(self._segments),
            rules=rules,
            prescales=ctypes.pointer(c_double(1)),
            postscale=1,
            factor=1,
            gradient_count=1,
            copies=1,
            contracts=form.contracts,
            counted=counted,
            powers=not form.width_bytes,
            roots=(c_void_p * 2)(*form.roots),
        )


class KernelStep:
    """Takes steps on segments, with the sums of their gradients, for all ranks of a node."""

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
            powers=not form.width_bytes,
            roots=(c_void_p * 2)(*form.roots),
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
