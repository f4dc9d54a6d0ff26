"""Operations of every kind on each rank, while timelines are recorded.

Arguments: a directory for the files; how many seconds the clock of each rank is ahead of the
one of the rank before it, and how much faster it is.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from job import RESULTS
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.errors import MismatchError

FOLDER, AHEAD, FASTER = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
LATE_SECONDS = 0.4  # in the test, too


def set_clock(rank: int) -> Callable[[], float]:
    """Give this rank the clock of another host; return what tells by how much it is ahead."""
    real = time.perf_counter
    began = real()

    def ahead_at(now: float) -> float:
        return rank * (AHEAD + FASTER * (now - began))

    time.perf_counter = lambda: (now := real()) + ahead_at(now)
    return lambda: ahead_at(real())


def timed(call: Callable[[], None], ahead: Callable[[], float]) -> dict[str, object]:
    before, began = ahead(), time.perf_counter()
    call()
    return {"seconds": time.perf_counter() - began, "ahead": [before, ahead()]}


def refused_paths() -> None:
    """Every rank hears that rank 0 cannot write, and that a timeline is being recorded."""
    for path in (FOLDER / "missing" / "file.json", FOLDER):
        with pytest.raises(ValueError, match=f"timeline {path} cannot be written"):
            hvd.start_timeline(str(path))
    hvd.stop_timeline()  # without one, as in Horovod: nothing


def free_standing(members: hvd.ProcessSet) -> None:
    rank, size = hvd.rank(), hvd.size()
    submitted = [Path(os.environ[RESULTS]) / f"submitted.{other}" for other in range(size - 1)]
    if rank == size - 1:
        while not all(file.exists() for file in submitted):
            time.sleep(0.01)
        time.sleep(LATE_SECONDS)
    late = hvd.allreduce_async(torch.full((1000,), float(rank)), name="late")
    if rank < size - 1:
        submitted[rank].touch()
    hvd.synchronize(late)
    rows = torch.ones(size, 3)
    hvd.allgather(rows, name="gathered")
    hvd.broadcast(rows, 0, name="sent")
    hvd.alltoall(rows, name="exchanged")
    hvd.reducescatter(rows, name="scattered", op=hvd.Sum)
    hvd.barrier()
    order = [f"any {number}" for number in range(6)]
    handles = [hvd.allreduce_async(rows, name=name) for name in order[rank:] + order[:rank]]
    for handle in handles:
        hvd.synchronize(handle)
    if members.included():
        hvd.allreduce(rows, name="of a set", process_set=members)
    with pytest.raises(MismatchError):
        hvd.allreduce(torch.ones(2 + rank), name="differs")
    if rank == 0:
        hvd.allreduce(rows, name="alone", op=hvd.Sum)
    hvd.join()


def optimizer_steps() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(3)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 40)).sum().backward()
        optimizer.step()


def main() -> None:
    hvd.init()
    ahead = set_clock(hvd.rank())
    ranks = [0, 2] if hvd.size() > 2 else [1]
    members = hvd.add_process_set(ranks)
    refused_paths()
    calls = {"start": timed(lambda: hvd.start_timeline(FOLDER / "first.json", True), ahead)}
    with pytest.raises(ValueError, match=r"already.*stop_timeline"):
        hvd.start_timeline(FOLDER / "other.json")
    free_standing(members)
    optimizer_steps()
    # Rank 0 asks for it before the end, the others after: it is not over when the file is.
    handle = hvd.allreduce_async(torch.ones(1), name="cut") if hvd.rank() == 0 else None
    calls["end"] = timed(hvd.stop_timeline, ahead)
    hvd.synchronize(handle or hvd.allreduce_async(torch.ones(1), name="cut"))
    hvd.allreduce(torch.ones(1), name="in between")
    hvd.start_timeline(str(FOLDER / "second.json"))
    hvd.allreduce(torch.ones(5), name="again")
    hvd.broadcast_parameters(torch.nn.Linear(2, 2).state_dict())
    hvd.shutdown()  # ends it, too
    report(cases=1, payload=calls)


main()
