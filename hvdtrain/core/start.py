"""init() as Horovod has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.core import context
from hvdtrain.core.process_set import ProcessSet, add_process_set

__all__ = ["init"]


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    engine: str | None = None,
) -> None:
    """Join the world of ranks that the launcher started (collective); see `context.init`.

    Args:
        comm: must be None; Horovod's way to a part of the world, for which there are process
            sets.
        process_sets: sets to register at once, the same on every rank; "dynamic" is Horovod's
            word for sets that are added later, which always works here.
        engine: "auto" or the name of an engine; None takes HVDTRAIN_ENGINE, or auto.
    """
    if comm is not None:
        raise ValueError("init(comm) is not supported: pass process_sets=[ProcessSet(ranks)]")
    context.init(engine)
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)
