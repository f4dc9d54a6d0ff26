"""What the horovod engine promises beyond the contract, on real ranks."""

import pytest
from horovod_environment import horovod_python
from ranks import run_ranks

# Two ranks compute on one core while Horovod has nothing to do. The launcher knows of more cores;
# else Open MPI would give way by itself.
BUSY = """
import os, time
from hvdtrain.config import Config
from hvdtrain.engines.registry import open_world
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
communicator = open_world("horovod", Config.from_environ(os.environ), os.environ).communicator
communicator.barrier()
own, whole = time.thread_time(), time.process_time()
while time.thread_time() - own < 0.5:  # however long it takes to get so much of the core
    pass
share = (time.thread_time() - own) / (time.process_time() - whole)
communicator.barrier()
assert share > 0.8, share  # Open MPI left to itself: a half
"""


@pytest.mark.horovod
def test_horovods_waiting_threads_give_way_to_training() -> None:
    run_ranks(["-c", BUSY], 2, python=horovod_python())
