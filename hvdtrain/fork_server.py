"""What multiprocessing's fork server imports so that its children end with its rank.

A child's parent is the server, which lives as long as its children. With data loader workers from
it, the launcher of a rank that was killed would wait for them forever.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from functools import partial


def _end_with(process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    os._exit(1)


def _watch(process: int, server: int) -> None:
    if os.getppid() == server:  # what a child forks may outlive it
        name = "hvdtrain-parent"
        threading.Thread(target=_end_with, args=[process], name=name, daemon=True).start()


with suppress(OSError, AttributeError):  # an old system, or a Python built on one
    rank = os.pidfd_open(os.getppid())
    os.register_at_fork(after_in_child=partial(_watch, rank, os.getpid()))
