"""Rows that ranks have computed separately, gathered in the order of the data set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.collective import collective
from hvdtrain.core.objects import allgather_object, call_on_root
from hvdtrain.data.sampling.sharding import Indices
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.train.loop.collective_errors import call_everywhere
from hvdtrain.train.metrics.exact import Gathered

Array = npt.NDArray[Any]


@collective
def gather_rows(indices: Indices, arrays: Sequence[Array]) -> list[Array]:
    """Return the rows of all ranks, in the order of the samples.

    The same rows give the same bits on every rank and on any number of ranks.

    Args:
        indices: int64 numbers of the samples that this rank's rows belong to, [rows]; may be empty.
        arrays: arrays of [rows, ...], as many on every rank, with rows of one shape and type.

    Returns:
        For each of `arrays` the rows of all ranks, [all rows, ...].
    """
    parts = allgather_object((indices, list(arrays)), "rows")
    numbers = np.concatenate([theirs for theirs, _ in parts])
    _require_once(numbers, [len(theirs) for theirs, _ in parts])
    order = np.argsort(numbers)
    filled = [rows for theirs, rows in parts if len(theirs)] or [arrays]
    return [np.concatenate(rows)[order] for rows in zip(*filled, strict=True)]


@collective
def gathered_value(metric: Gathered, indices: Indices, outputs: Array, targets: Array) -> float:
    """Return a metric of the rows of all ranks, computed by rank 0.

    Args:
        outputs: outputs for this rank's samples, [rows, ...].
        targets: targets of this rank's samples, [rows, ...].
    """
    everything = gather_rows(indices, [outputs, targets])
    # One rank computes it: another processor may round differently.
    return call_on_root(lambda: metric.value(*everything))


def _require_once(numbers: Indices, counts: Sequence[int]) -> None:
    unique, first = np.unique(numbers, return_index=True)
    if len(unique) == len(numbers):
        return
    ranks = np.repeat(np.arange(len(counts)), counts)
    again = int(np.setdiff1d(np.arange(len(numbers)), first)[0])
    owners = ranks[numbers == numbers[again]].tolist()
    raise HvdtrainError(
        f"gathering rows: sample {int(numbers[again])} came {len(owners)} times, from ranks "
        f"{owners}, expected once: give each sample to one rank only"
    )


@collective
def predict_on_all_ranks(
    chunks: Sequence[Indices], outputs_of: Callable[[Indices], Array]
) -> Array:
    """Return the outputs for all samples, in order, on every rank.

    Args:
        outputs_of: returns the outputs for a chunk, [samples, ...].
    """
    parts = call_everywhere(partial(_compute, chunks, outputs_of))
    indices = np.concatenate([np.zeros(0, np.int64), *chunks])
    rows = np.concatenate(parts) if parts else np.zeros((0,), np.float32)
    (outputs,) = gather_rows(indices, [rows])
    return outputs


def split_samples(samples: Indices, size: int) -> list[Indices]:
    """Split samples into chunks.

    Args:
        samples: int64 numbers of the samples, [n].
    """
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _compute(chunks: Sequence[Indices], outputs_of: Callable[[Indices], Array]) -> list[Array]:
    try:
        return [outputs_of(chunk) for chunk in chunks]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UsageError(f"the model does not take these inputs: {reason}") from error
