"""Sources of batches of torch tensors: arrays, map-style data sets, or streams."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pickle import PicklingError
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from hvdtrain.data.dataset import Augment, Samples, augmented, is_stream
from hvdtrain.data.sampling import sample_seed, seed_generators
from hvdtrain.errors import UsageError
from hvdtrain.train.loop.step_plan import Microbatch
from hvdtrain.train.recipe import MODULES

Move = Callable[[Any], Any]
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Step:
    """What the ranks do in one step, with the numbers of the samples of all of them, [n]."""

    number: int
    samples: npt.NDArray[np.int64]
    microbatches: list[Microbatch]

    @property
    def own(self) -> npt.NDArray[np.int64]:
        """The numbers of the samples of this rank, [m]."""
        return np.concatenate([each.samples[: each.count] for each in self.microbatches] or [_NONE])


@dataclass(frozen=True)
class Batch:
    """A microbatch on the device; inputs and targets are None if it has no samples."""

    microbatch: Microbatch
    inputs: Any
    targets: Any


def _batches_of(
    step: Step, read: Callable[[npt.NDArray[np.int64]], tuple[Any, Any]]
) -> tuple[Step, list[Batch]]:
    """Return a step with a batch for each microbatch, which is read if it has samples."""
    parts = step.microbatches
    return step, [Batch(m, *(read(m.samples) if len(m.samples) else (None, None))) for m in parts]


class Source(Protocol):
    """Reads the samples of this rank."""

    def batches(self, steps: Iterable[Step], epoch: int) -> Iterator[tuple[Step, list[Batch]]]:
        """Yield each step with the batches of its microbatches."""


@dataclass(frozen=True)
class ArraySource:
    """Samples that are on the device as a whole."""

    inputs: Any
    targets: Any

    def batches(self, steps: Iterable[Step], epoch: int) -> Iterator[tuple[Step, list[Batch]]]:
        for step in steps:
            yield _batches_of(step, self._read)

    def _read(self, samples: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        chosen = torch.from_numpy(samples).to(self.inputs.device)
        return self.inputs[chosen], self.targets[chosen]


class SeededRows:
    """A map-style data set whose random changes depend on seed, epoch and sample alone."""

    def __init__(self, dataset: Any, augment: Augment | None, seed: int, epoch: int) -> None:
        # First: it is unpickled before what it defines, which follows, or is the loader's.
        self._files = [module for name, module in sys.modules.items() if name.startswith(MODULES)]
        self._dataset, self._augment, self._seed, self._epoch = dataset, augment, seed, epoch

    def __getitem__(self, index: int) -> Any:
        """Return a sample, with the generators of Python, numpy and torch seeded for it."""
        seed_generators(sample_seed(self._seed, self._epoch, index))
        return augmented(self._dataset[index], self._augment, self._seed, self._epoch, index)


@dataclass(frozen=True)
class LoaderSource:
    """A map-style data set read by torch's DataLoader."""

    dataset: Any
    augment: Augment | None
    collate: Callable[[list[Any]], Any] | None
    workers: int
    seed: int
    move: Move

    def batches(self, steps: Iterable[Step], epoch: int) -> Iterator[tuple[Step, list[Batch]]]:
        steps = list(steps)
        wanted = [microbatch.samples.tolist() for step in steps for microbatch in step.microbatches]
        rows: Any = SeededRows(self.dataset, self.augment, self.seed, epoch)
        loader: Any = DataLoader(
            rows,
            batch_sampler=[indices for indices in wanted if indices],
            num_workers=self.workers,
            collate_fn=self.collate,
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")
                read = iter(loader)
        except (AttributeError, PicklingError, TypeError) as error:
            raise UsageError(
                f"--workers {self.workers}: data cannot be sent to other processes ({error}): "
                "define its classes and functions at the top level of a file, or use --workers 0"
            ) from error
        try:
            for step in steps:
                yield _batches_of(step, lambda _: self._next(read))
        finally:  # when Python exits it would be too late for its processes
            if self.workers:
                with suppress(RuntimeError):  # a process was killed with the job
                    read._shutdown_workers()

    def _next(self, read: Iterator[Any]) -> tuple[Any, Any]:
        with _last_line_of_errors():
            inputs, targets = next(read)
        return self.move(inputs), self.move(targets)


@dataclass(frozen=True)
class StreamSource:
    """An iterable that every rank reads as a whole to keep its part of each global batch.

    Each sample is therefore used once, and in the same step, on any number of ranks; the price is
    that every rank reads everything. Samples come in the iterable's own order.

    The generators of Python, numpy and torch are seeded before each sample is read, as for
    map-style data, so that what is drawn for it is the same on every rank.
    """

    stream: Any
    augment: Augment | None
    collate: Callable[[list[Any]], Any]
    seed: int
    move: Move

    def batches(self, steps: Iterable[Step], epoch: int) -> Iterator[tuple[Step, list[Batch]]]:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)
        stream, at = self._seeded(epoch), 0
        for step in steps:
            first, wanted = int(step.samples[0]), len(step.samples)
            items = list(islice(stream, first - at, first - at + wanted))
            at = first + wanted
            if len(items) < wanted:
                raise UsageError(
                    f"the training data ended before sample {at} of epoch {epoch + 1}: "
                    "samples_per_epoch of the recipe must be no more than it yields"
                )
            yield _batches_of(step, partial(self._read, items, first, epoch))

    def _seeded(self, epoch: int) -> Iterator[Any]:
        seed_generators(sample_seed(self.seed, epoch, 0))
        stream = iter(self.stream)
        for index in count():
            seed_generators(sample_seed(self.seed, epoch, index))
            try:
                sample = next(stream)
            except StopIteration:
                return
            yield sample

    def _read(
        self, items: list[Any], first: int, epoch: int, samples: npt.NDArray[np.int64]
    ) -> tuple[Any, Any]:
        chosen = [
            augmented(items[index - first], self.augment, self.seed, epoch, index)
            for index in samples.tolist()
        ]
        inputs, targets = self.collate(chosen)
        return self.move(inputs), self.move(targets)


def make_source(
    data: Any,
    move: Move,
    seed: int,
    workers: int = 0,
    augment: Augment | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Source:
    """Return a source that reads Samples, map-style data, or an iterable."""
    if isinstance(data, Samples) and augment is None:
        inputs, targets = (torch.from_numpy(array) for array in (data.inputs, data.labels))
        return ArraySource(move(inputs), move(targets))
    if is_stream(data):
        collate = collate or torch.utils.data.default_collate
        return StreamSource(data, augment, collate, seed, move)
    return LoaderSource(data, augment, collate, workers, seed, move)


@contextmanager
def _last_line_of_errors() -> Iterator[None]:
    """Shorten an error to its last line: a worker process passes on its whole traceback."""
    try:
        yield
    except UsageError as error:
        lines = str(error).strip().splitlines()
        if len(lines) == 1:
            raise
        raise UsageError(lines[-1].partition(": ")[2]) from None
