"""The gathering of objects that engines need before their communicators exist."""

from __future__ import annotations

from typing import Any, Protocol


class Allgather(Protocol):
    """Gathers one JSON-serializable value per rank, in rank order.

    Tuples may arrive as lists.
    """

    def __call__(self, value: Any, /) -> list[Any]: ...
