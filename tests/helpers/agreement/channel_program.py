"""What the ranks of a trial do: the operations they submit, and what they wait for."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdtrain.types import DType, ReduceOp

# In place of the planned operation a rank submits the same with another shape, or a barrier.
OTHER, BARRIER = 1, 2

# Of an operation for which a program does not wait before its section ends.
NEVER = 99


@dataclass
class Planned:
    """One operation, as the ranks submit it."""

    number: int
    kind: str
    name: str
    ends: str
    section: int
    op: ReduceOp = ReduceOp.SUM
    dtype: DType = DType.FLOAT64
    counts: tuple[int, ...] = (1,)
    prescale: float = 1.0
    variants: dict[int, int] = field(default_factory=dict)
    filled: dict[int, int] = field(default_factory=dict)
    weights: dict[int, float | None] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    attending: tuple[int, ...] = ()
    ready: int = NEVER


@dataclass(frozen=True)
class Act:
    """One thing that a rank's program does, and with which operation."""

    kind: str
    number: int = -1


@dataclass
class Program:
    """What all ranks do."""

    seed: int
    size: int
    threaded: bool
    plans: dict[str, tuple[int, ...]]
    operations: list[Planned]
    acts: list[list[Act]]
