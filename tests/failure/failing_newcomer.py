"""A script in which ranks that are to join others raise, or lose these before they have joined."""

import os
import signal
import sys
import time
from typing import Any

from newcomers import JOINED, await_newcomer
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core.recruiter import Recruiter

TRIES = 3


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    """Have rank 1 be killed, and rank 0 go on until all that are to replace it have failed."""
    if JOINED:
        raise ValueError("as it was told to")
    noticed: list[str] = []
    fail = Recruiter._fail

    def noting(self: Recruiter, text: str) -> None:
        fail(self, text)
        noticed.append(text)

    Recruiter._fail = noting  # type: ignore[method-assign]
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while hvd.size() > 1 or len(noticed) < TRIES:
            if hvd.rank() == 1:
                be_killed()
            time.sleep(0.01)
            hvd.barrier()

    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
    report(1, hvd.size())


def is_left_alone() -> None:
    """Have rank 0 be killed, too, when another rank joins that has no state yet."""
    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        assert not JOINED
        if hvd.rank() == 1:
            be_killed()
        while True:
            hvd.barrier()
            await_newcomer(2 if hvd.size() == 1 else 0)
            state.commit()

    state: Any = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank)
    state.register_reset_callbacks([lambda: be_killed() if hvd.size() == 2 else None])
    train(state)


if __name__ == "__main__":
    {"raises": raises, "is left alone": is_left_alone}[sys.argv[1]]()
