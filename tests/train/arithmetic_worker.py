"""Reduce numbers that are too small to be normal, and sums that are too large for their type.

Threads would take small numbers for zeros. Rank 0 waits where it calls, so that its own thread
adds; on the others a thread of hvdtrain's does. The way in which ranks of a node meet is set on
rank 0 alone, as where mpirun starts ranks on other hosts.
"""

import os
import resource
import warnings

import torch
from job import rank_of
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.ordered import OrderedCommunicator
from hvdtrain.engines.mpi.communicator import MpiCommunicator
from hvdtrain.engines.shared_memory.node_group import NodeGroup
from hvdtrain.types import ReduceOp

# By the variables that choose it. What is added, and where, differs between them.
WAYS = {
    "kernel": {"HVDTRAIN_SHARED_MEMORY": "1"},
    "numpy": {"HVDTRAIN_SHARED_MEMORY": "numpy"},
    "mpi": {"HVDTRAIN_SHARED_MEMORY": "0"},
    "fixed order": {"HVDTRAIN_SHARED_MEMORY": "0", "HVDTRAIN_DETERMINISTIC": "1"},
    "fixed order in shared memory": {"HVDTRAIN_SHARED_MEMORY": "1"},
    "gloo": {"HVDTRAIN_ENGINE": "gloo", "HVDTRAIN_DETERMINISTIC": "0"},
}
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the names of stand-in hosts lead nowhere
# Shown whole, in chunks, and (with numpy) in shared memory.
COUNTS = (10, 20_000, 100_000)


def patterns(rank: int, count: int) -> torch.Tensor:
    """Return the bits of float32 numbers; they add like these integers as long as none is 2^23."""
    return torch.arange(count, dtype=torch.int32) % 1000 + 1 + 1000 * rank


def tiny(rank: int, count: int) -> torch.Tensor:
    return patterns(rank, count).view(torch.float32)


def reduced(tensor: torch.Tensor, op: ReduceOp, name: str) -> torch.Tensor:
    if hvd.rank() == 0:
        return hvd.allreduce(tensor, op=op, name=name).view(torch.int32)
    return hvd.synchronize(hvd.allreduce_async(tensor, op=op, name=name)).view(torch.int32)


def faults(way: str) -> list[str]:
    found = []
    ranks = range(hvd.size())
    for count in COUNTS:
        total = torch.stack([patterns(rank, count) for rank in ranks]).sum(0)
        if not torch.equal(reduced(tiny(hvd.rank(), count), hvd.Sum, f"sum {count}"), total):
            found.append(f"{way}: sum of {count}")
        # Equal vectors are averaged.
        if not torch.equal(reduced(tiny(0, count), hvd.Adasum, f"a {count}"), patterns(0, count)):
            found.append(f"{way}: Adasum of {count}")
    scattered = hvd.reducescatter(tiny(hvd.rank(), COUNTS[0]), op=hvd.Sum, name="scattered")
    total = torch.stack([patterns(rank, COUNTS[0]) for rank in ranks]).sum(0)
    own = total.tensor_split(hvd.size())[hvd.rank()]
    if not torch.equal(scattered.view(torch.int32), own):
        found.append(f"{way}: reduce-scatter")
    with warnings.catch_warnings():  # which could end a rank; infinity is for a loss scaler to find
        warnings.simplefilter("error")
        most = torch.full((1 << 19,), 3e38)
        sums = [
            hvd.allreduce(most, op=hvd.Sum, prescale_factor=factor, name="most")
            for factor in (1.0, 2.0)
        ]
    if not all(each.isinf().all() for each in sums):
        found.append(f"{way}: a sum that is too large")
    return found


def way_of_world() -> str:
    """Say how the ranks meet now; the setting alone would not show a fall-back."""
    communicator = context.current().world.communicator
    if isinstance(communicator, OrderedCommunicator):
        return "fixed order"
    if not isinstance(communicator, MpiCommunicator):
        return "gloo"
    hierarchy = communicator._hierarchy
    group = communicator._node_group if hierarchy is None else hierarchy._group
    return "mpi" if group is None else "kernel" if isinstance(group, NodeGroup) else "numpy"


def sum_without_memory_to_share() -> bool:
    """Return whether tensors that no peer can read are added by MPI."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    whole = torch.full((1 << 19,), hvd.rank() + 1)  # which need no order of their own
    sums = [hvd.allreduce(whole, op=hvd.Sum, name="whole") for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return all(bool((each == hvd.size() * (hvd.size() + 1) / 2).all()) for each in sums)


assert torch.set_flush_denormal(True)  # before init(), whose threads inherit it
wrong = []
for name, variables in WAYS.items():
    if rank_of(os.environ) == 0 or name == "gloo":
        os.environ.update(variables)
    hvd.init()
    if not name.startswith(way_of_world()):
        wrong.append(f"{name}: ranks meet by {way_of_world()}")
    wrong += faults(name)
    if name == "fixed order in shared memory" and not sum_without_memory_to_share():
        wrong.append(f"{name}: a sum without memory to share")
    hvd.shutdown()
    # The caller's own mode is as it was.
    if (torch.tensor(1e-40) * 1.0).view(torch.int32).item() != 0:
        wrong.append(f"{name}: changed the mode of the caller")
report(cases=len(WAYS), payload=wrong)
