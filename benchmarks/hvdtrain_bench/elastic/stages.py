"""Times within hvdtrain's recovery from the loss of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hvdtrain.core import context
from hvdtrain.core.membership.recovery import Recovery
from hvdtrain.engines.communicator import EngineWorld, Newcomer
from hvdtrain.engines.mpi.failures import MpiFailures
from hvdtrain_bench.harness.notes import Notes

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
