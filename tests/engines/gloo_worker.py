"""What the gloo engine promises beyond the contract. Arguments: names of cases."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from job import RESULTS
from shared_launch import run_each

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines import registry
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.engines.features import Pending
from hvdtrain.engines.registry import VisibleGpus, open_world
from hvdtrain.errors import PeerFailureError
from hvdtrain.types import DType, ReduceOp


def join() -> EngineWorld:
    """Join the world of the gloo engine."""
    return open_world("gloo", Config.from_environ(os.environ), os.environ)


def total(communicator: Communicator, value: int) -> int:
    """Sum one number over the ranks."""
    array = np.array([value])
    communicator.allreduce(Buffer.from_array(array), ReduceOp.SUM)
    return int(array[0])


def begin(communicator: Communicator) -> Pending:
    """Begin to wait, in the core's way, until every rank has come."""
    return communicator.start_max(np.array([communicator.rank], np.uint64))


def wait(pending: Pending) -> None:
    """Wait for the end of that."""
    while not pending.test():
        time.sleep(0.001)


def say(word: str) -> None:
    """Tell the other ranks something by a file, not by the engine that is tested."""
    (Path(os.environ[RESULTS]) / word).touch()


def hear(word: str) -> None:
    """Wait until a rank says so."""
    while not (Path(os.environ[RESULTS]) / word).exists():
        time.sleep(0.01)


def halves() -> object:
    """Sums of halves are rounded once, and their average does not overflow on the way."""
    c = join().communicator
    half = torch.full((3,), 60000.0 + 64 * c.rank, dtype=torch.float16)
    buffer = Buffer(half.data_ptr(), DType.FLOAT16, 3, owner=half)
    c.allreduce(buffer, ReduceOp.SUM, 1.0, 1 / c.size)
    assert half.tolist() == [60000.0 + 32 * (c.size - 1)] * 3, half
    # 256 + 1 + 1: bfloat16 has no 257, so a sum that is rounded on the way stays at 256.
    brain = torch.full((5,), [256.0, 1.0, 1.0, 0.0][c.rank], dtype=torch.bfloat16)
    c.allreduce(Buffer(brain.data_ptr(), DType.BFLOAT16, 5, owner=brain), ReduceOp.SUM)
    assert brain.tolist() == [258.0] * 5, brain
    return None


def integers() -> object:
    """Unsigned numbers keep their highest bit, and factors of integers truncate."""
    c = join().communicator
    for op, expected in ((ReduceOp.MAX, 2**64 - 1), (ReduceOp.MIN, 1), (ReduceOp.SUM, 0)):
        large = np.array([2**64 - 1 if c.rank else 1], np.uint64)
        c.allreduce(Buffer.from_array(large), op)
        assert large.tolist() == [expected], (op, large)
    whole = np.array([-7, 7, 1000], np.int32)
    c.allreduce(Buffer.from_array(whole), ReduceOp.SUM, 0.5, 0.5)  # -3.5 is -3, twice, is -6
    assert whole.tolist() == [-3, 3, 500]
    return None


def splits() -> object:
    """Subgroups concern their members only, side by side and one inside the other."""
    c = join().communicator
    lower = c.split([1, 0])
    upper = c.split([2, 3])
    mine = lower or upper
    assert mine is not None
    expected = {0: (1, 11), 1: (0, 11), 2: (0, 1100), 3: (1, 1100)}[c.rank]
    assert (mine.rank, total(mine, 10**c.rank)) == expected
    if lower is not None:
        inner = lower.split([1])  # rank 0 of the world; the others know nothing of it
        assert (inner is None) == (c.rank == 1)
        assert inner is None or total(inner, 5) == 5
    assert total(c, 1) == 4
    return None


def sockets() -> object:
    """Where the engine listens; and torch.distributed is still the user's to set up."""
    open_world("mpi", Config.from_environ(os.environ), os.environ)
    before = _listening()  # MPI does that too
    world = join()
    own = _listening().items() - before.items()
    assert not dist.is_initialized()
    world.communicator.barrier()
    return sorted(address for _, address in own)


def _listening() -> dict[str, str]:
    """Return the address of each listening socket of this process, in the kernel's hex."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {f"socket:[{row[9]}]": row[1].split(":")[0] for row in rows if row[3] == "0A"}
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the one that listed the folder
            continue
    return {name: address for name, address in listening.items() if name in own}


def gone_rank() -> object:
    """A rank whose connections end is an error for those that wait for it, at once."""
    c = join().communicator
    c.barrier()
    if c.rank == 1:
        hear("rank 0 waits")
        c.close()
        hear("rank 0 has noticed")  # not the end of this process
        return None
    pending = begin(c)
    say("rank 0 waits")
    failures = [_failure(lambda: wait(pending)), _failure(lambda: total(c, 1))]
    say("rank 0 has noticed")
    return failures


def _failure(function: Callable[[], object]) -> str:
    try:
        function()
    except PeerFailureError as error:
        return str(error)
    raise AssertionError("no error")


def again() -> object:
    """A world can be left and joined again, and close() twice does nothing."""
    for _ in range(2):
        world = join()
        assert total(world.communicator, 1) == world.communicator.size
        world.communicator.close()
        world.communicator.close()
    return world.nodes


def network() -> object:
    """How many processes there are by this world's count, and where they are."""
    world = join()
    return [total(world.communicator, 1), len(world.hostnames)]


def automatic() -> object:
    """All ranks leave the engine for host memory for nccl, or none; here gloo stands for that."""
    registry.ENGINES["nccl"] = registry.ENGINES["gloo"]
    rank, found = int(os.environ["OMPI_COMM_WORLD_RANK"]), []
    for seen in (
        [VisibleGpus(2), VisibleGpus(2)],
        [VisibleGpus(2), VisibleGpus(0)],
        [VisibleGpus(0), VisibleGpus(0)],
    ):
        vars(registry)["find_visible_gpus"] = lambda *_, own=seen[rank]: own
        world = registry.open_engine("auto", Config(), os.environ)
        assert total(world.communicator, 1) == 2
        world.communicator.close()
        found.append([world.engine, world.library.partition("; ")[2].replace(*_HERE)])
    return found


_HERE = (socket.gethostname(), "here")

CASES = (halves, integers, splits, sockets, gone_rank, again, network, automatic)

if __name__ == "__main__":
    run_each({case.__name__: case for case in CASES}, sys.argv[1:])
