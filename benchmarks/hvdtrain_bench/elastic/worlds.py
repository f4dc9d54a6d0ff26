"""The worlds in which a process of `train` works, one after the other.

A recipe's file is executed again in each world, and this module is not.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path

from hvdtrain_bench.elastic.stages import noted_stages
from hvdtrain_bench.harness.notes import Notes

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
