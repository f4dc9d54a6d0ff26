"""Errors that all ranks raise together, so that all of them continue or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import OneRankError, UsageError
from hvdtrain.topology import format_by_rank
from hvdtrain.train.options import OPTIONS, TrainOptions

T = TypeVar("T")

_OPTIONS = "options"


@collective
def call_everywhere(function: Callable[[], T]) -> T:
    """Call a function on every rank and return each rank's own result."""
    results: list[T] = []
    problem: str | None = None
    try:
        results.append(function())
    except UsageError as error:
        problem = str(error)
    problems = [text for text in allgather_object(problem, "problems") if text is not None]
    if problems:
        raise UsageError(problems[0])
    return results[0]


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
def require_same_options(options: TrainOptions) -> None:
    """Check that all ranks were given the same options."""
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


def refuse_options(message: str) -> None:
    """Make require_same_options() raise on the other ranks, because this one's options are invalid.

    Collective, together with require_same_options() on the other ranks.
    """
    allgather_object(message, _OPTIONS)
