"""Rows that ranks have computed separately, gathered in the order of the data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.elastic import tells_of_lost_ranks
from hvdtrain.core.exits import is_internal, own_frame
from hvdtrain.core.objects import all_fail, allgather_object, call_on_root, vote
from hvdtrain.data.sampling import Indices
from hvdtrain.errors import (
    HostsUpdatedInterrupt,
    HvdtrainError,
    OneRankError,
    OneRankTrainingError,
    RecipeError,
    UsageError,
)
from hvdtrain.topology import format_by_rank
from hvdtrain.train.metrics import Gathered
from hvdtrain.train.options import OPTIONS, TrainOptions

T = TypeVar("T")

_OPTIONS = "options"


@collective
def call_everywhere(function: Callable[[], T]) -> T:
    """Call a function on every rank and return each rank's own result."""
    results: list[T] = []
    own: UsageError | RecipeError | None = None
    alone: OneRankError | None = None
    try:
        results.append(function())
    except UsageError as error:
        own, alone = error, OneRankError(str(error))
    except RecipeError as error:
        own, alone = error, OneRankTrainingError(str(error))
    if not vote([own is not None], "problems", alone).any():
        return results[0]
    told = None if own is None else (str(own), isinstance(own, RecipeError))
    problems = allgather_object(told, "problems")
    rank, (text, of_recipe) = next((n, found) for n, found in enumerate(problems) if found)
    if not of_recipe:
        raise UsageError(text)
    raise RecipeError(f"rank {rank}: " * (None in problems) + text)


@contextmanager
def on_this_rank() -> Iterator[None]:
    """Treat a UsageError raised in the block as this rank's alone."""
    try:
        yield
    except OneRankError:
        raise
    except UsageError as error:
        if context.current().topology.size == 1:
            raise
        raise OneRankError(str(error)) from error


@collective
@contextmanager
def code_of_recipe(options: TrainOptions) -> Iterator[None]:
    """Tell in one line what the recipe's code raises in the block, on one rank or on all."""
    try:
        yield
    except (HvdtrainError, HostsUpdatedInterrupt):
        raise
    except Exception as error:
        begun = context.is_initialized()
        if not begun or is_internal(error) or tells_of_lost_ranks(error, context.current()):
            raise
        text = f"{options.recipe} failed: {own_frame(error, options.verbose)}"
        try:
            everywhere = all_fail(options.recipe)
        except HvdtrainError:  # the others are gone
            raise error from None
        raise (RecipeError if everywhere else OneRankTrainingError)(text) from error


@collective
def require_same_options(options: TrainOptions) -> None:
    gathered: list[TrainOptions | str] = allgather_object(options, _OPTIONS)
    options_by_rank: list[TrainOptions] = []
    for rank, options_or_error in enumerate(gathered):
        if isinstance(options_or_error, str):
            raise UsageError(f"rank {rank}: {options_or_error}")
        options_by_rank.append(options_or_error)
    for option in OPTIONS:
        values = [str(getattr(one, option.name)) for one in options_by_rank]
        if len(set(values)) > 1:
            raise UsageError(
                f"{option.label} differs between ranks ({format_by_rank(values)}): give all "
                "ranks the same options"
            )


@collective
def refuse_options(message: str) -> None:
    """Make require_same_options() raise on the other ranks, because this one's options are invalid.

    Collective, together with require_same_options() on the other ranks.
    """
    allgather_object(message, _OPTIONS)


Array = npt.NDArray[Any]


@collective
def gather_rows(indices: Indices, arrays: Sequence[Array]) -> list[Array]:
    """Return the rows of all ranks, [all rows, ...], in the order of their samples, `indices`.

    The same rows give the same bits on every rank and on any number of ranks.
    """
    parts = allgather_object((indices, list(arrays)), "rows")
    numbers = np.concatenate([theirs for theirs, _ in parts])
    if len(np.unique(numbers)) != len(numbers):
        raise HvdtrainError("gathering rows: a sample came from two ranks: give each to one only")
    order = np.argsort(numbers)
    filled = [rows for theirs, rows in parts if len(theirs)] or [arrays]
    return [np.concatenate(rows)[order] for rows in zip(*filled, strict=True)]


@collective
def gathered_value(metric: Gathered, indices: Indices, outputs: Array, targets: Array) -> float:
    """Return a metric of the rows of all ranks, computed by rank 0."""
    everything = gather_rows(indices, [outputs, targets])
    # One rank computes it: another processor may round differently.
    return call_on_root(lambda: metric.value(*everything))


@collective
def predict_on_all_ranks(
    chunks: Sequence[Indices], outputs_of: Callable[[Indices], Array]
) -> Array:
    """Return the outputs for all samples, in order, on every rank."""

    def compute() -> list[Array]:
        try:
            return [outputs_of(chunk) for chunk in chunks]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UsageError(f"the model does not take these inputs: {reason}") from error

    parts = call_everywhere(compute)
    indices = np.concatenate([np.zeros(0, np.int64), *chunks])
    rows = np.concatenate(parts) if parts else np.zeros((0,), np.float32)
    (outputs,) = gather_rows(indices, [rows])
    return outputs


def split_samples(samples: Indices, size: int) -> list[Indices]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]
