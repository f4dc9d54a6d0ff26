"""Python stacks of the threads of this process."""

from __future__ import annotations

import sys
import threading
import traceback
from itertools import dropwhile
from types import FrameType


def thread_stacks() -> str:
    """Return the Python stacks of all other threads, with the main thread first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda t: t is not threading.main_thread())
    return "".join(
        f"{thread.name}, most recent call last:\n{_stack(frames[thread.ident])}"
        for thread in threads
        if thread is not threading.current_thread() and thread.ident in frames
    )


def _stack(frame: FrameType) -> str:
    # Omit the frames in which Python starts a thread.
    calls = dropwhile(
        lambda call: call.filename == threading.__file__, traceback.extract_stack(frame)
    )
    return "".join(traceback.format_list(list(calls)))
