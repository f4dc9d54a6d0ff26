"""What a tracker is, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ["RunInfo", "Status", "Tracker"]

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told of a run.

    Attributes:
        name: of the run, where --run-name gives no other.
        directory: of the run; what a tracker must remember for a resume lies there.
        parameters: flat: options as resolved, and facts of the world.
        resumed_step: steps done in the checkpoint that the run goes on from; None: from the start.
    """

    name: str
    directory: Path
    parameters: Mapping[str, Any]
    resumed_step: int | None = None


class Tracker(Protocol):
    """Takes the figures of one run; used on rank 0 alone.

    Methods do not wait for a network. They raise when something is wrong with what they were given
    now or before, and can be called again all the same.
    """

    @property
    def location(self) -> str:
        """Where the figures are to be found, without passwords."""

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Take values by name.

        Args:
            values: by name; not finite ones are allowed.
            step: optimizer steps done.
            seconds: since the very first start of the run.
        """

    def artifact(self, path: Path) -> None:
        """Take a file; it must stay as it is until end() has returned."""

    def end(self, status: Status) -> None:
        """Take the end: "stopped" is a run that will go on later. Nothing may be called after."""
