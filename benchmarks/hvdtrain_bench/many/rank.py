"""One rank of a job of the core alone: rank.py FOLDER END.

The job "stalls" before its end, is "killed" with its last rank, or "goes-on" without that. The rank
writes what each stage took, in seconds of CPU and of time, and what it holds to FOLDER/rank.json.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.process_set import add_process_set
from hvdtrain.engines.mpi.engine import initialize, load_mpi
from hvdtrain.errors import RanksLostError
from hvdtrain.types import ReduceOp

STALLS, KILLED, GOES_ON = "stalls", "killed", "goes-on"
REPORTED = "reported"  # a file: the stall was
LATE = "late"  # the operation that stalls
_CALLS = 20
_POLL_SECONDS = 0.05


@collective
def main(folder: str, end: str) -> None:
    """Join, measure, and end; an error of an operation ends the job."""
    notes: dict[str, Any] = {}
    mpi = load_mpi()
    _stage(notes, "MPI_Init", lambda: initialize(mpi, os.environ))
    if end != GOES_ON:
        atexit.register(mpi.Finalize)
    _stage(notes, "init", context.init)
    here = context.current().topology
    file, last = Path(folder, f"{here.rank:04}.json"), here.rank == here.size - 1
    _stage(notes, "first all-reduce", _sum)
    _stage(notes, "all-reduce", lambda: [_sum() for _ in range(_CALLS)], times=_CALLS)
    _stage(notes, "process set", lambda: add_process_set(range(0, here.size, 2)))
    notes |= {"node": here.node, **_held()}
    _sum()  # all are here
    try:
        if end != STALLS:
            file.write_text(json.dumps(notes), encoding="ascii")
            _sum()  # the launcher ends all once one is killed, which others may wait for here
            if last:
                notes["killed at"] = time.time()
                file.write_text(json.dumps(notes), encoding="ascii")
                os.kill(os.getpid(), signal.SIGKILL)
        notes["waits since"] = 0.0 if last else time.time()
        while last and not Path(folder, REPORTED).exists():
            time.sleep(_POLL_SECONDS)
        _sum(LATE)
    except RanksLostError:
        _stage(notes, "recovery", context.recover)
        _sum()
    _stage(notes, "shutdown", context.shutdown)
    file.write_text(json.dumps(notes), encoding="ascii")


@collective
def _sum(name: str = "sum") -> None:
    """Check a sum that depends on all ranks."""
    here = context.current()
    ones = np.full(64, 1.0 + here.topology.rank, np.float32)
    buffers = [Buffer.from_array(ones)]
    operations.allreduce(here.world, buffers, [ones.shape], ReduceOp.SUM, name).run()
    size = here.topology.size
    if not np.array_equal(ones, np.full(64, size * (size + 1) / 2, np.float32)):
        raise AssertionError(f"{here.topology.title} wrong sum {ones}")


def _stage(notes: dict[str, Any], name: str, run: Callable[[], object], times: int = 1) -> None:
    began, used = time.perf_counter(), time.process_time()
    run()
    now = time.process_time() - used, time.perf_counter() - began
    notes[name] = [seconds / times for seconds in now]


def _held() -> dict[str, int]:
    """Return the bytes and descriptors that this process holds.

    Memory that several ranks map counts in equal parts for each of them.
    """
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kib = {words[0]: int(words[1]) for words in map(str.split, lines)}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "memory": kib["Rss:"] << 10,
        "share": kib["Pss:"] << 10,
        "node memory": kib["Pss_Shmem:"] << 10,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
