"""Where the threads of this process are."""

from __future__ import annotations

import sys
import threading
import traceback
from itertools import dropwhile
from types import FrameType

__all__ = ["thread_stacks"]


def thread_stacks() -> str:
    """Return the Python stack of every thread but the calling one, the main thread's first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda t: t is not threading.main_thread())
    return "".join(
        f"{thread.name}, most recent call last:\n{_stack(frames[thread.ident])}"
        for thread in threads
        if thread is not threading.current_thread() and thread.ident in frames
    )


def _stack(frame: FrameType) -> str:
    # How Python starts a thread tells nobody anything.
    calls = dropwhile(
        lambda call: call.filename == threading.__file__, traceback.extract_stack(frame)
    )
    return "".join(traceback.format_list(list(calls)))
