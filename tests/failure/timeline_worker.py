"""Ranks that record a timeline until one of them does not come; the argument says how it ends."""

import os
import sys
import threading
import time

import torch
from held_clock import HeldClock

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.timeline import file

STEPS = 40


def main(end: str) -> None:
    if end == "stalls":
        file._PAUSE_SECONDS = 1000.0  # all that is written is what is saved at the end
        clock = HeldClock()  # no step is a stall, however late a rank is
    os.environ["HOROVOD_TIMELINE"] = "it.json"
    hvd.init()
    for step in range(STEPS):
        total = hvd.allreduce(torch.full((10,), hvd.rank() + step), name=f"step {step}", op=hvd.Sum)
        assert total[0] == sum(rank + step for rank in range(hvd.size()))
    if hvd.rank() == 0:
        if end == "stalls":
            threading.Thread(target=go_when_stuck, args=[clock], daemon=True).start()
        hvd.allreduce(torch.ones(1), name="stuck")
    time.sleep(600)


def go_when_stuck(clock: HeldClock) -> None:
    """Have time pass when the program is blocked, and the operation has been proposed."""
    recording = context.current().recording
    assert recording is not None
    while True:
        times = recording.under_way()
        proposed = [o for c in times.channels for o in c.operations.kept if o.proposed is not None]
        if times.blocked.kept and [o.name for o in proposed] == ["stuck"]:
            break
        time.sleep(0.01)
    clock.go()


main(sys.argv[1])
