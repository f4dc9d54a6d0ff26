"""What goes wrong in a trial of a channel, and what happens in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from channel_operations import Value
from meeting_engine import EngineFault

# In place of a section: the leave of a program that ends before its time.
GAVE_UP = -1


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a trial."""

    rank: int
    engine: EngineFault | None = None
    stops: int | None = None
    closes: bool = False

    @property
    def deserts(self) -> bool:
        """Whether the engine does what it should, and a rank only leaves early."""
        return self.engine is None and not self.closes

    def __str__(self) -> str:
        end = "closes" if self.closes else "leaves"
        if self.engine is None:
            return f"rank {self.rank} {end} before act {self.stops}"
        return f"rank {self.rank}: {self.engine}, and then {end}"


@dataclass
class Outcome:
    """How an operation ended on one rank."""

    value: Value | None = None
    error: BaseException | None = None
    refused: bool = False

    def __str__(self) -> str:
        if self.error is None:
            return f"done with {self.value}"
        kind = "refused" if self.refused else "failed"
        return f"{kind} with {type(self.error).__name__}: {self.error}"


@dataclass
class Record:
    """What happened on one rank."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    ends: dict[int, Outcome] = field(default_factory=dict)
    filled: Counter[int] = field(default_factory=Counter)
    submitted: set[int] = field(default_factory=set)
    left_over: list[str] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    complete: bool = False
