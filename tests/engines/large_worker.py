"""Broadcasts more than 2^31 bytes, the most that one MPI count can say."""

from __future__ import annotations

import os

import numpy as np
from ranks import report

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines.registry import open_world

COUNT = (2**31 + 2**20) // 8

communicator = open_world("mpi", Config.from_environ(os.environ), os.environ).communicator
array = np.full(COUNT, -1, np.int64)
if communicator.rank == 1:
    array[:] = np.arange(COUNT)
communicator.broadcast(Buffer.from_array(array), 1)
assert array[0] == 0
assert array[-1] == COUNT - 1
assert int(array.sum()) == COUNT * (COUNT - 1) // 2
report(cases=1, payload=array.nbytes)
