"""Runs the contract's table on each rank. Arguments: engine, then the name of a fault or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from contract_cases import all_cases
from contract_gpu import on_gpu
from ranks import report

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.registry import open_world
from hvdtrain.types import ReduceOp


def main(engine: str, fault: str) -> None:
    """Run every case that the engine takes twice, and report how many it took and refused."""
    communicator = open_world(engine, Config.from_environ(os.environ), os.environ).communicator
    if engine == "nccl":
        communicator = on_gpu(communicator)
    if fault:
        FAULTS[fault](communicator)
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
                communicator.abort(1)
        taken += 1
    communicator.barrier()
    report(cases=taken, payload={"taken": taken, "refused": refused, "size": communicator.size})


def _replace(communicator: Communicator, method: str, broken: Callable[..., Any]) -> None:
    setattr(communicator, method, broken)


def _identity(communicator: Communicator) -> None:
    _replace(communicator, "allreduce", lambda *_: None)


def _times_size(communicator: Communicator) -> None:
    def broken(buffer: Buffer, op: ReduceOp, *_: float) -> None:
        array = buffer.array()
        np.multiply(array, communicator.size, out=array, casting="unsafe")

    _replace(communicator, "allreduce", broken)


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


def _one_call_late(communicator: Communicator) -> None:
    right = communicator.allreduce
    last: dict[int, Any] = {}

    def broken(buffer: Buffer, op: ReduceOp, *factors: float) -> None:
        right(buffer, op, *factors)
        fresh = buffer.array().copy()
        buffer.array()[:] = last.get(buffer.count, np.zeros((), buffer.dtype.numpy))
        last[buffer.count] = fresh

    _replace(communicator, "allreduce", broken)


FAULTS = {
    "identity": _identity,
    "times size": _times_size,
    "forgets a rank": _forgets_a_rank,
    "wrong root": _wrong_root,
    "one call late": _one_call_late,
}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
