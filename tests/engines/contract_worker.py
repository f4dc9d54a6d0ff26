"""Runs the contract's table on each rank.

Arguments: cases of it, one after the other in one job: an engine, then settings or a fault, as
"mpi", "mpi CHUNK_BYTES=1000 SHARED_MEMORY=0" or "mpi: wrong root".
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from contract_cases import all_cases
from contract_device import on_device
from job import RESULTS
from shared_launch import run_each

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.registry import open_world
from hvdtrain.types import ReduceOp
from hvdtrain.world import promised_world


class _Cases(dict[str, Callable[[], object]]):
    def __missing__(self, case: str) -> Callable[[], object]:
        return lambda: _run(case)


def _run(case: str) -> dict[str, int]:
    named, _, fault = case.partition(": ")
    engine, *settings = named.split()
    communicator = _open(engine, dict(f"HVDTRAIN_{word}".split("=") for word in settings))
    if fault:
        FAULTS[fault](communicator)
    taken, refused = _run_table(communicator, bool(fault))
    communicator.barrier()
    return {"taken": taken, "refused": refused, "size": communicator.size}


def _open(name: str, settings: Mapping[str, str]) -> Communicator:
    engine = name
    # Environments of other engines have no torch.
    if engine == "hidden":
        from hidden_engine import make_known

        make_known()
    elif engine == "mpi-hidden":
        from hidden_mpi import let_mpi_take_the_device

        let_mpi_take_the_device()
        engine = "mpi"
    elif engine == "nccl":
        _share_gpus()
    environ = {**os.environ, **settings}
    communicator = open_world(engine, Config.from_environ(environ), environ).communicator
    if name in DEVICES:
        return on_device(communicator, DEVICES[name])
    return communicator


def _share_gpus() -> None:
    """Have NCCL take ranks for ranks of as many hosts, where there are fewer GPUs than ranks."""
    import torch

    promised = promised_world(os.environ)
    if promised is not None and promised.size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank {promised.rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def _run_table(communicator: Communicator, broken: bool) -> tuple[int, int]:
    taken, refused = 0, 0
    for case in all_cases():
        if case.objection(communicator) is not None:
            refused += 1
            continue
        for _ in range(2):
            try:
                case.run(communicator)
            except AssertionError as error:
                text = f"rank {communicator.rank} of {communicator.size}, {case.title}: {error}"
                print(text, file=sys.stderr, flush=True)
                if broken:
                    _await_all(communicator)
                communicator.abort(1)
        taken += 1
    return taken, refused


def _await_all(communicator: Communicator) -> None:
    """Wait until every rank has said what is wrong: the first one to end silences the others."""
    folder = Path(os.environ[RESULTS])
    (folder / f"failed.{communicator.rank}").touch()
    while len(list(folder.glob("failed.*"))) < communicator.size:
        time.sleep(0.01)


def _replace(communicator: Communicator, method: str, broken: Callable[..., Any]) -> None:
    setattr(communicator, method, broken)


def _forgets_a_rank(communicator: Communicator) -> None:
    whole = communicator.allreduce

    def broken(buffer: Buffer, op: ReduceOp, *factors: float) -> None:
        if communicator.rank == communicator.size - 1 and op is ReduceOp.SUM:
            buffer.array()[:] = np.zeros((), buffer.dtype.numpy)
        whole(buffer, op, *factors)

    _replace(communicator, "allreduce", broken)


def _wrong_root(communicator: Communicator) -> None:
    right = communicator.broadcast
    _replace(
        communicator,
        "broadcast",
        lambda buffer, root_rank: right(buffer, (root_rank + 1) % communicator.size),
    )


# Where an engine's table has its operands, if not in host memory.
DEVICES = {"nccl": "cuda", "hidden": "hidden", "mpi-hidden": "hidden"}

FAULTS = {"forgets a rank": _forgets_a_rank, "wrong root": _wrong_root}

if __name__ == "__main__":
    run_each(_Cases(), sys.argv[1:])
