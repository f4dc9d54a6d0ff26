"""A process of a model in which the ranks that are left go on, and how far it has got. Pure."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from explorer import Fault
from model_meeting import is_call
from model_rank import FAILED, REFUSED, Call, Heard, Ran, Rank, progress_of

from hvdtrain.core.agreement.decision import ReportsExchanged, Voted
from hvdtrain.core.agreement.request import Request


class Stage(Enum):
    """What a process does.

    RUNNING its program; ABANDONING its channel, whose driver may be in an engine call; WAITING for
    all ranks that are left; OPENING the next world; OVER in order; DEAD.
    """

    RUNNING = auto()
    ABANDONING = auto()
    WAITING = auto()
    OPENING = auto()
    OVER = auto()
    DEAD = auto()


class Process(NamedTuple):
    """A process."""

    stage: Stage
    group: tuple[int, ...]
    rank: Rank
    world: int = 0
    part: int = 0
    broken: bool = False


class Processes(NamedTuple):
    """All processes, and how many may still die."""

    all: tuple[Process, ...]
    deaths_left: int


def is_left(process: Process) -> bool:
    """Return whether a process has not ended."""
    return process.stage not in (Stage.OVER, Stage.DEAD)


def end(process: Process, stage: Stage) -> Process:
    """Return a process that has ended, of which nothing is left but how operations ended."""
    rank = Rank(ended=process.rank.ended if stage is Stage.OVER else ())
    return Process(stage, process.group, rank, process.world)


def call_of(process: Process) -> Call | None:
    """Return the engine call that the driver of a process is in."""
    head = process.rank.actions[0] if process.rank.actions else None
    if isinstance(head, Request):
        progress = progress_of(process.rank, head)
        # Otherwise it waits for the program to fill a bucket.
        return head if progress is None or progress.ready else None
    return head if is_call(head) else None


def has_outcome(process: Process) -> bool:
    """Return whether the engine call is done, and the driver has not gone on yet."""
    actions = process.rank.actions
    return bool(actions) and isinstance(actions[0], Voted | ReportsExchanged | Ran | Heard)


def is_told(before: Rank, after: Rank) -> bool:
    """Return whether a program is told by its last word that ranks are lost."""
    news = dict(set(after.ended) - set(before.ended))
    refused = [name for name, how in news.items() if how == REFUSED]
    if not (refused or after.over):
        return False
    if not after.life.lost:
        raise Fault(f"{refused or sorted(after.ended)}: an error does not say that ranks are lost")
    if not refused and FAILED not in dict(after.ended).values():
        raise Fault(f"the program ends with {sorted(after.ended)}")
    return True


def put(state: Processes, number: int, process: Process) -> Processes:
    """Return the processes with one of them changed."""
    return state._replace(all=(*state.all[:number], process, *state.all[number + 1 :]))


def break_world(state: Processes, of: Process) -> Processes:
    """Have the calls fail that are made in the world of a process."""
    return state._replace(
        all=tuple(
            other._replace(broken=True) if is_left(other) and other.world == of.world else other
            for other in state.all
        )
    )
