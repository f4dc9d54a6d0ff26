"""What the gloo engine promises beyond the contract. Arguments: names of cases."""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch.distributed as dist
from job import RESULTS
from shared_launch import run_each

from hvdtrain import engines
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines import VisibleGpus, open_world
from hvdtrain.engines.communicator import Communicator, EngineWorld, Pending
from hvdtrain.errors import PeerFailureError
from hvdtrain.types import ReduceOp


def join() -> EngineWorld:
    return open_world("gloo", Config.from_environ(os.environ), os.environ)


def total(communicator: Communicator, value: int) -> int:
    array = np.array([value])
    communicator.allreduce(Buffer.from_array(array), ReduceOp.SUM)
    return int(array[0])


def begin(communicator: Communicator) -> Pending:
    """Begin to wait, in the core's way, until every rank has come."""
    return communicator.start_max(np.array([communicator.rank], np.uint64))


def wait(pending: Pending) -> None:
    while not pending.test():
        time.sleep(0.001)


def say(word: str) -> None:
    """Tell the other ranks something by a file, not by the engine that is tested."""
    (Path(os.environ[RESULTS]) / word).touch()


def hear(word: str) -> None:
    while not (Path(os.environ[RESULTS]) / word).exists():
        time.sleep(0.01)


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
    for _ in range(2):
        world = join()
        assert total(world.communicator, 1) == world.communicator.size
        world.communicator.close()
        world.communicator.close()
    return world.nodes


def network() -> object:
    world = join()
    return [total(world.communicator, 1), len(world.hostnames)]


def automatic() -> object:
    """All ranks leave the engine for host memory for nccl, or none; here gloo stands for that."""
    engines.ENGINES["nccl"] = engines.ENGINES["gloo"]
    rank, found = int(os.environ["OMPI_COMM_WORLD_RANK"]), []
    for seen in (
        [VisibleGpus(2), VisibleGpus(2)],
        [VisibleGpus(2), VisibleGpus(0)],
        [VisibleGpus(0), VisibleGpus(0)],
    ):
        vars(engines)["find_visible_gpus"] = lambda *_, own=seen[rank]: own
        world = engines.open_engine("auto", Config(), os.environ)
        assert total(world.communicator, 1) == 2
        world.communicator.close()
        found.append([world.engine, world.library.partition("; ")[2].replace(*_HERE)])
    return found


_HERE = (socket.gethostname(), "here")

CASES = (sockets, gone_rank, again, network, automatic)

if __name__ == "__main__":
    run_each({case.__name__: case for case in CASES}, sys.argv[1:])
