"""The worlds in which a process of `train` works, one after the other, and what comes between them.

A recipe's file is executed again in each world, and this module is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from unittest.mock import patch

from hvdtrain.core import context
from hvdtrain.core.recovery import Recovery
from hvdtrain.engines.communicator import EngineWorld, Newcomer
from hvdtrain.engines.mpi.failures import MpiFailures
from hvdtrain_bench.elastic.notes import Notes

NOTICED, AGREED, REBUILT = "noticed", "agreed", "rebuilt"


@contextmanager
def noted_stages(notes: Notes) -> Iterator[None]:
    """Note when this rank notices that others have ended, and when it has done what follows."""
    recover, reopen = context.recover, MpiFailures.reopen

    def noted_recover(leaving: Collection[int] = ()) -> Recovery:
        notes.add(NOTICED)
        recovery = recover(leaving)
        notes.add(REBUILT)
        return recovery

    def noted_reopen(failures: MpiFailures, newcomer: Newcomer | None = None) -> EngineWorld:
        world = reopen(failures, newcomer)
        notes.add(AGREED)
        return world

    with (
        patch.object(context, "recover", noted_recover),
        patch.object(MpiFailures, "reopen", noted_reopen),
    ):
        yield


_GENERATIONS = count()
_UNTIL_THE_END = ExitStack()


def begin_world(folder: Path) -> Notes:
    """Note that a world begins, and return the notes of this process.

    summary.json of the run says where later worlds begin.
    """
    notes = _notes(folder)
    generation = next(_GENERATIONS)
    notes.world(generation, 0 if generation == 0 else None)
    return notes


@cache
def _notes(folder: Path) -> Notes:
    notes = Notes(folder)
    _UNTIL_THE_END.enter_context(noted_stages(notes))
    return notes
