"""The mark of functions that all ranks must call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def collective(function: _Function) -> _Function:
    """Mark a function that all members of its process set must call, in the same order.

    A function without the mark is local. `tests/unit/package/test_collective_calls.py` checks that
    whatever calls a collective function is marked, too. The mark costs nothing in a call.
    """
    return function
