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
own, whole = time.thread_time(), time.process_time()
while time.thread_time() - own < 0.5:  # however long it takes to get so much of the core
    pass
share = (time.thread_time() - own) / (time.process_time() - whole)
communicator.barrier()
report(cases=1, payload=share)
