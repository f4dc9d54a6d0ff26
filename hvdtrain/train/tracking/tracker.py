"""The interface of trackers, and the information that they get about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """Information about a run for trackers."""

    name: str
    directory: Path
    parameters: Mapping[str, Any]
    resumed_step: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    """Records the values of one run; used on rank 0 only.

    Methods do not wait for a network. They raise if something is wrong with the values of this or
    an earlier call, and can be called again all the same.
    """

    @property
    def location(self) -> str:
        """Where the values can be found, without passwords."""

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Record values."""

    def artifact(self, path: Path) -> None:
        """Record a file, which must not change until end() has returned."""

    def end(self, status: Status) -> None:
        """End the run; call nothing afterwards. "stopped" means that it will be resumed."""
