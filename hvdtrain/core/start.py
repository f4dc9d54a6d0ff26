"""init() as Horovod has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.core import context
from hvdtrain.core.process_set import ProcessSet, add_process_set

__all__ = ["init", "on_init"]

_actions: list[Callable[[], None]] = []


def on_init(action: Callable[[], None]) -> None:
    """Call a function at the beginning of each init(), and at once if the world is joined (local).

    Args:
        action: for an adapter that has to prepare its framework; does nothing a second time.
    """
    _actions.append(action)
    if context.is_initialized():
        action()


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    engine: str | None = None,
) -> None:
    """Join the world of ranks that the launcher started (collective); see `context.init`.

    Args:
        comm: None, or all ranks as a list or an mpi4py communicator; for a part of the world
            there are process sets.
        process_sets: sets to register at once, the same on every rank; "dynamic" is Horovod's
            word for sets that are added later, which always works here. A second call adds none.
        engine: "auto" or the name of an engine; None takes HVDTRAIN_ENGINE, or auto.

    Raises:
        ValueError: `comm` is not the whole world; see `context.init` for the others.
    """
    if isinstance(comm, str):
        raise ValueError(f"init({comm!r}): the first argument is comm; write init(engine={comm!r})")
    for action in _actions:
        action()
    joins = not context.is_initialized()
    context.init(engine)
    if comm is not None and not _is_whole(comm, context.current().topology.size):
        raise ValueError(
            "init(comm) takes the whole world only: for a part of it pass "
            "process_sets=[ProcessSet(ranks)]"
        )
    if joins and process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def _is_whole(comm: Any, size: int) -> bool:
    if hasattr(comm, "Get_size"):
        return bool(comm.Get_size() == size)
    return sorted(comm) == list(range(size))
