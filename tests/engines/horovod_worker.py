"""Two ranks that compute on one core while Horovod has nothing to do."""

from __future__ import annotations

import os
import time

from ranks import report

from hvdtrain.config import Config
from hvdtrain.engines.registry import open_world

# The launcher knows of more cores; else Open MPI would give way by itself.
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
communicator = open_world("horovod", Config.from_environ(os.environ), os.environ).communicator
communicator.barrier()
own, whole, end = time.thread_time(), time.process_time(), time.monotonic() + 2
while time.monotonic() < end:
    pass
share = (time.thread_time() - own) / (time.process_time() - whole)
communicator.barrier()
report(cases=1, payload=share)
