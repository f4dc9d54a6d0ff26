"""What ranks must find out together, so that all of them go on or none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import OneRankError, UsageError
from hvdtrain.train.options import OPTIONS, TrainOptions

__all__ = ["by_rank", "call_everywhere", "on_this_rank", "refuse_options", "require_same_options"]

T = TypeVar("T")

_OPTIONS = "options"


def call_everywhere(function: Callable[[], T]) -> T:
    """Call `function` on every rank and return each rank's own result (collective).

    Raises:
        UsageError: on every rank, what the call raised on the first rank where it did.
    """
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
    """Take a refusal in the block for this rank's own, of which the others do not know.

    Raises:
        OneRankError: on this rank; it ends the job where nobody catches it.
    """
    try:
        yield
    except UsageError as error:
        if context.current().topology.size == 1:
            raise
        raise OneRankError(str(error)) from error


def require_same_options(mine: TrainOptions) -> None:
    """Compare the options of all ranks (collective).

    Raises:
        UsageError: on every rank, they differ, or a rank has called tell_refusal() instead.
    """
    answers: list[TrainOptions | str] = allgather_object(mine, _OPTIONS)
    asked: list[TrainOptions] = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, str):
            raise UsageError(f"rank {rank}: {answer}")
        asked.append(answer)
    for option in OPTIONS:
        values = [str(getattr(options, option.name)) for options in asked]
        if len(set(values)) > 1:
            raise UsageError(
                f"{option.label} differs between ranks ({by_rank(values)}): give all ranks the "
                "same options"
            )


def refuse_options(message: str) -> None:
    """Tell the ranks in require_same_options() that this one refuses its own (collective)."""
    allgather_object(message, _OPTIONS)


def by_rank(values: Sequence[str]) -> str:
    """Say which ranks have which value: "ranks 0-1: cuda:0, rank 2: cpu"."""
    parts = []
    for value, group in groupby(enumerate(values), key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in group]
        title = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        parts.append(f"{title}: {value}")
    return ", ".join(parts)
