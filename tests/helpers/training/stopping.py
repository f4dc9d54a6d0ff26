"""A signal to a rank while it trains."""

import os
import signal
from collections.abc import Callable
from itertools import count

import pytest

from hvdtrain.core import context
from hvdtrain.train.loop import heartbeat


def after_step(patches: pytest.MonkeyPatch, step: int, act: Callable[[], None]) -> None:
    steps, plain = count(1), heartbeat.Heartbeat.count_step

    def acting(self: heartbeat.Heartbeat) -> bool:
        if next(steps) == step:
            act()
        return plain(self)

    patches.setattr(heartbeat, "_EVERY_SECONDS", 0.0)
    patches.setattr(heartbeat.Heartbeat, "count_step", acting)


def stop_in_step(patches: pytest.MonkeyPatch, step: int) -> None:
    """Have the last rank get a signal after this step."""
    after_step(patches, step, _ask_to_stop)


def _ask_to_stop() -> None:
    here = context.current().topology
    if here.rank == here.size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
