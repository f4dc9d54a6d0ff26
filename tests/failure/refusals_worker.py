"""Start and go on while one rank may open but a few files more, and where Linux forbids a call.

Args:
    "caught" to go on after each refusal, or "uncaught" to end with the first.
"""

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from forbidding import PIDFD_OPEN, forbid
from logged import logged
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.gathers import allocate
from hvdtrain.engines.mpi.communicator import MpiCommunicator
from hvdtrain.errors import SystemLimitError

LIMIT = 300
PART_BYTES = 16 << 20
PR_SET_DUMPABLE = 4


@contextmanager
def few_files(left: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(left):
            os.close(held.pop())
    try:
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def refusal(work: Callable[[], object], left: int, short: bool) -> str:
    """Return what is said where one rank may open so few files, "" where it is enough."""
    with few_files(left if short else LIMIT // 2):
        try:
            work()
        except SystemLimitError as error:
            return str(error)
    return ""


def refusal_of_memory(short: bool) -> str:
    """Return what is said where one rank has room for its own part of some memory alone."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    if short:
        resource.setrlimit(resource.RLIMIT_AS, (mapped + PART_BYTES * 5 // 4, before[1]))
    try:
        context.current().world.run(allocate(PART_BYTES, "large"))
    except SystemLimitError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return ""


def pidfds() -> int:
    """Return how many processes are watched; one descriptor is that of the listing itself."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        count += os.path.lexists(path) and "pidfd" in os.readlink(path)
    return count


def train() -> None:
    weight = torch.nn.Parameter(torch.ones(100_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5))
    (weight * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((100_000,), 1 - 0.5 * 1.5))


def watched_beside(channels: int) -> list[int]:
    """Return how many processes are watched with that many channels more, and after the end."""
    world = context.current().world
    counts = [pidfds()]
    for number in range(channels):
        assert context.current().open_channel(range(2), f"channel {number}", world) is not None
    counts.append(pidfds())
    hvd.shutdown()
    return [*counts, pidfds()]


@contextmanager
def hidden_files() -> Iterator[None]:
    """Have ranks not see each other's files, as processes of other users do not."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    # Effective, permitted and inherited ones, 32 of each, twice.
    without = (ctypes.c_uint32 * 6)(0, sets[1], sets[2], 0, sets[4], sets[5])
    assert libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    assert libc.capset(header, without) == 0
    try:
        yield
    finally:
        assert libc.capset(header, sets) == 0
        assert libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


def warnings_apart() -> list[str]:
    """Return what this rank warns of where ranks do not share memory; they add all the same."""

    def train_apart() -> None:
        hvd.init()
        communicator = context.current().world.communicator
        assert isinstance(communicator, MpiCommunicator)
        assert communicator._node_group is None
        train()
        hvd.shutdown()

    return logged(train_apart)


def main() -> None:
    # Either all ranks catch what they would else leave to rank 0, or the job ends before the others
    # speak, however late the launcher is.
    context._REPORT_SECONDS = 600.0 if "uncaught" in sys.argv else 0.0
    hvd.init()
    rank = hvd.rank()
    train()  # loads whatever Python loads late
    hvd.shutdown()
    if "uncaught" in sys.argv:
        with few_files(1 if rank == 1 else LIMIT // 2):
            hvd.init()
    said: dict[str, list[str]] = {}
    watched = {}
    for way in ("1", "numpy"):
        os.environ["HVDTRAIN_SHARED_MEMORY"] = way
        gc.collect()  # what garbage holds is not to be closed between the two counts
        files = len(os.listdir("/proc/self/fd"))
        # With two or three, init() fails after the world is known, and ends the job.
        said[f"init {way}"] = [refusal(hvd.init, left, rank == 1) for left in (0, 1, 4)]
        hvd.init()
        said[f"train {way}"] = [refusal(train, left, rank == 1) for left in range(2)]
        train()
        said[f"memory {way}"] = [refusal_of_memory(rank == 1)]
        watched[way] = watched_beside(5)
        assert len(os.listdir("/proc/self/fd")) == files, way
    os.environ["HVDTRAIN_SHARED_MEMORY"] = "1"
    with hidden_files():
        warned = warnings_apart()
    if rank == 1:
        forbid(PIDFD_OPEN)
    warned += warnings_apart()
    report(
        cases=len(said),
        payload={"said": said, "watched": watched, "warned": warned, "process": os.getpid()},
    )


main()
