"""For ranks of a job that one of them ends, when the launcher may be late to end the others."""

from __future__ import annotations

from hvdtrain.engines.shared_memory.processes import PeerWatch

__all__ = ["leave_it_to_the_launcher"]


def leave_it_to_the_launcher() -> None:
    """Have this rank not look for peers that have ended.

    It does so once a second while it waits for them, and would say what it has seen, with a
    traceback, and end the job itself, if the launcher had not ended it by then.
    """
    PeerWatch.ended = lambda self: None  # type: ignore[method-assign]
