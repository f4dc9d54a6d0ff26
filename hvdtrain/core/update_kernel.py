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
from typing import Any, TypeAlias

import numpy as np

from hvdtrain.compiled import load_or_report, open_library

_SOURCE = Path(__file__).with_name("update_kernel.c")
_MODULE = "hvdtrain.core._update_kernel"

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


# Factors of the ranks' gradients, and that of their sum; None where gradients are summed already.
Scales: TypeAlias = tuple[Sequence[float], float] | None


class KernelStep:
    """Steps of the kernel on segments, with the sums of their gradients over the ranks of a node.

    Args:
        weights: address of each segment's weights on each rank, this rank's first, [n, ranks].
        form: how the kernel computes.
        own: number of this rank.
        counted: whether the caller counts steps, because threads update parts of the segments.
        fields: other fields of KernelSegment, for each segment.

    Attributes:
        gradients: address of each segment's gradient on each rank, [n, ranks].
        segments: the fields of KernelSegment, [n].
    """

    def __init__(
        self, weights: Any, form: Form, own: int = 0, counted: bool = False, **fields: Any
    ) -> None:
        library = load_kernel()
        assert library is not None  # otherwise there is no form
        self._library, self._weights = library, np.array(weights, np.uint64)
        count, ranks = self._weights.shape
        self.gradients = np.zeros_like(self._weights)
        self.segments = np.zeros(count, np.dtype(KernelSegment))
        rows = np.arange(count, dtype=np.uint64) * np.uint64(8 * ranks)
        self.segments["weights"] = rows + np.uint64(self._weights.ctypes.data)
        self.segments["gradients"] = rows + np.uint64(self.gradients.ctypes.data)
        for name, values in fields.items():
            self.segments[name] = values
        self._prescales = np.ones(ranks)
        self._update = KernelUpdate(
            segments=self.segments.ctypes.data_as(POINTER(KernelSegment)),
            segment_count=count,
            prescales=self._prescales.ctypes.data_as(POINTER(c_double)),
            copies=ranks,
            own=own,
            contracts=form.contracts,
            counted=counted,
            powers=not form.width_bytes,
            roots=(c_void_p * 2)(*form.roots),
        )

    def count(self, rules: Sequence[KernelRule]) -> None:
        self._call("hvd_count", rules)

    def update(
        self, rules: Sequence[KernelRule], scales: Scales = None, factor: float = 1.0
    ) -> None:
        """Update weights and state, and write the weights into the copies of all ranks."""
        self._call("hvd_update", rules, scales, factor)

    def sum(self, scales: Scales) -> float:
        """Overwrite this rank's gradients with the scaled sums; return the sum of their squares."""
        self._call("hvd_sum", (), scales)
        total = 0.0
        for square in self.segments["squares"].tolist():
            total += square  # sum() rounds in another way since Python 3.12
        return total

    def _call(
        self,
        name: str,
        rules: Sequence[KernelRule],
        scales: Scales = None,
        factor: float = 1.0,
    ) -> None:
        factors, postscale = scales or ((1.0,), 1.0)
        self._prescales[: len(factors)] = factors
        update = self._update
        update.rules = (KernelRule * len(rules))(*rules)
        update.gradient_count, update.postscale, update.factor = len(factors), postscale, factor
        getattr(self._library, name)(update)


# A thread that has less to do takes longer to wake up than it saves.
_LEAST_OF_A_THREAD = 1 << 16


class TensorSteps:
    """Takes steps on whole tensors that have a state already.

    Args:
        places: of each parameter the addresses of its weights, of three arrays of its state, and of
            its steps, or 0; the number of its elements, that of its rule, and whether it is double.
        threads: number of threads.
        form: how the kernel computes.
    """

    def __init__(self, places: Sequence[Sequence[int]], threads: int, form: Form) -> None:
        numbers = np.array(places, np.int64).reshape(-1, 8)
        counts, total = numbers[:, 5], int(numbers[:, 5].sum())
        itemsizes = np.where(numbers[:, 7], 8, 4)
        self._bytes = counts * itemsizes
        lengths = np.stack([*[self._bytes] * 4, np.full_like(counts, 4)], axis=1)
        used = (numbers[:, :5] != 0) & (lengths > 0)
        written, lengths = numbers[:, :5][used], lengths[used]
        order = np.argsort(written)
        self._written, self._ends = written[order], np.append(0, (written + lengths)[order])
        self._apart = bool((self._ends[:-1] <= self._written).all())
        begins = np.cumsum(counts) - counts
        threads = max(1, min(threads, total // _LEAST_OF_A_THREAD))
        self._others = ThreadPoolExecutor(max(1, threads - 1), "hvdtrain-step")
        # The elements of each parameter that a thread updates, and where they begin, in bytes.
        self._parts: list[tuple[KernelStep, np.typing.NDArray[np.uint64]]] = []
        for first, last in pairwise(total * number // threads for number in range(threads + 1)):
            starts = np.clip(first - begins, 0, counts)
            offsets = starts * itemsizes
            addresses = numbers[:, :4] + np.where(numbers[:, :4], offsets[:, None], 0)
            step = KernelStep(
                addresses[:, :1],
                form,
                counted=True,
                state=addresses[:, 1:],
                steps=numbers[:, 4],
                count=np.clip(last - begins, 0, counts) - starts,
                rule=numbers[:, 6],
                is_double=numbers[:, 7],
            )
            self._parts.append((step, offsets.astype(np.uint64)))

    def are_apart(self, gradients: Sequence[int]) -> bool:
        """Return whether nothing else is in memory that a step writes."""
        first = np.array(gradients, np.int64)
        before = np.searchsorted(self._written, first + self._bytes)
        return self._apart and bool((self._ends[before] <= first).all())

    def take(self, gradients: Sequence[int], rules: Sequence[KernelRule]) -> None:
        """Take a step on the parameters whose gradients have an address that is not 0."""
        found = np.array(gradients, np.uint64)
        for step, offsets in self._parts:
            step.gradients[:, 0] = found + offsets
            step.segments["skipped"] = found == 0
        left = [step for step, _ in self._parts]
        left[0].count(rules)

        def work() -> None:
            with suppress(IndexError):
                while True:
                    left.pop().update(rules)

        running: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # no thread starts, as when the main thread has ended
                running.extend(self._others.submit(work) for _ in self._parts[1:])
            work()
        finally:
            wait(running)
