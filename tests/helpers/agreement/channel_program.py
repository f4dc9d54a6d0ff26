"""What the ranks of a trial do: the operations they submit, and what they wait for."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdtrain.types import DType, ReduceOp

__all__ = ["BARRIER", "NEVER", "OTHER", "Act", "Planned", "Program"]

# In place of the planned operation a rank submits the same with another shape, or a barrier.
OTHER, BARRIER = 1, 2

# Of an operation for which a program does not wait before its section ends.
NEVER = 99


@dataclass
class Planned:
    """One operation, as the ranks submit it.

    Attributes:
        number: its place among the operations of the trial.
        kind: what it does.
        name: equal on all ranks; "" has the channel number it.
        ends: "join" or "leave": how the section ends that it belongs to.
        section: the number of that section.
        op: the reduction.
        dtype: of the elements.
        counts: elements of each buffer (or bucket).
        prescale: factor before the reduction.
        variants: for each rank that submits it what it submits: 0, or how it differs.
        filled: how many buckets each of these fills.
        weights: for each of these its weight in the average.
        members: the ranks of a split.
        attending: the ranks that come to it when they hear that another is blocked in it.
        ready: by which phase it is complete.
    """

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
    """What all ranks do.

    Attributes:
        seed: from which it was made.
        size: how many ranks there are.
        threaded: whether a channel may have a thread of its own.
        plans: the bucket sizes of each plan.
        operations: all of them, by number.
        acts: what each rank does.
    """

    seed: int
    size: int
    threaded: bool
    plans: dict[str, tuple[int, ...]]
    operations: list[Planned]
    acts: list[list[Act]]
