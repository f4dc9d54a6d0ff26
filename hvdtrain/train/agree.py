"""Steps that can fail on some ranks and must then be refused on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import UsageError

__all__ = ["call_everywhere"]

T = TypeVar("T")


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
