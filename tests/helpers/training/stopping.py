"""A signal to a rank while it trains."""

from __future__ import annotations

import os
import signal
from itertools import count

import pytest

from hvdtrain.core import context
from hvdtrain.train.loop import heartbeat


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Have rank 1 get a signal after this step."""
    steps = count(1)
    after_step = heartbeat.Heartbeat.after_step

    def signalled(self: heartbeat.Heartbeat) -> bool:
        if next(steps) == step and context.current().topology.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return after_step(self)

    monkeypatch.setattr(heartbeat, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(heartbeat.Heartbeat, "after_step", signalled)
