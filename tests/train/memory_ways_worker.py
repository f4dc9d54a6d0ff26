"""Train a model of some MiB in each way in which ranks of a node can meet.

What one rank makes of all samples is computed here as well. Settings are given to rank 0 alone, as
mpirun does on several hosts.
"""

from __future__ import annotations

import os
import resource
import warnings

import torch
from job import rank_of
from ranks import report
from torch.nn import Linear, ReLU, Sequential

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.collectives.ordered import OrderedCommunicator
from hvdtrain.engines.mpi.communicator import MpiCommunicator
from hvdtrain.engines.shared_memory.node_group import NodeGroup

WAYS = ("1", "0", "numpy")
STEPS = 4
SAMPLES = 8


def model() -> Sequential:
    """Half a million elements: 4 MiB, in three buckets."""
    torch.manual_seed(0)
    return Sequential(Linear(64, 512), ReLU(), Linear(512, 900), ReLU(), Linear(900, 10))


def weights_of(net: Sequential) -> torch.Tensor:
    """Return all of them in one row."""
    return torch.cat([parameter.detach().view(-1) for parameter in net.parameters()])


def batch(rank: int, step: int) -> torch.Tensor:
    """Return a rank's own samples."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SAMPLES, 64, generator=generator, dtype=torch.float64)


def train(ranks: range, *, together: bool) -> torch.Tensor:
    """Return all weights after some steps with the samples of `ranks`."""
    net = model().double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if together:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        net(torch.cat([batch(rank, step) for rank in ranks])).square().mean().backward()
        optimizer.step()
    return weights_of(net)


def way_of_world() -> str:
    """Say how the ranks meet now; the setting alone would not show a fall-back."""
    communicator = context.current().world.communicator
    assert isinstance(communicator, MpiCommunicator)
    hierarchy = communicator._hierarchy
    group = communicator._node_group if hierarchy is None else hierarchy._group
    if group is None:
        return "0"
    return "1" if isinstance(group, NodeGroup) else "numpy"


def check_numbers_that_overflow() -> None:
    """Infinite gradients are for the loss scaler to find; a warning could end a rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        most = torch.full((1 << 19,), 3e38)
        for factor in (1.0, 2.0):
            summed = hvd.allreduce(most, op=hvd.Sum, prescale_factor=factor, name="most")
            assert summed.isinf().all()


def check_without_memory_to_share() -> None:
    """Sums of tensors that no peer reaches go on through MPI."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        for _ in range(2):
            whole = torch.full((1 << 19,), hvd.rank() + 1)  # which need no order of their own
            summed = hvd.allreduce(whole, op=hvd.Sum, name="whole")
            assert (summed == hvd.size() * (hvd.size() + 1) / 2).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def set_on_first_rank(name: str, value: str) -> None:
    """Set a variable where mpirun was called."""
    if rank_of(os.environ) == 0:
        os.environ[name] = value


torch.set_num_threads(1)
os.environ["HVDTRAIN_BUCKET_BYTES"] = str(2 << 20)
alone: torch.Tensor | None = None
found: dict[str, float] = {}
for way in WAYS:
    set_on_first_rank("HVDTRAIN_SHARED_MEMORY", way)
    hvd.init()
    if alone is None:
        alone = train(range(hvd.size()), together=False)
        moved = float(
            (alone - torch.cat([p.detach().view(-1) for p in model().parameters()])).abs().max()
        )
        assert moved > 1e-3, moved
    weights = train(range(hvd.rank(), hvd.rank() + 1), together=True)
    assert torch.equal(weights, hvd.broadcast(weights, 0, name="weights")), way
    found[way_of_world()] = float((weights - alone).abs().max())
    check_numbers_that_overflow()
    hvd.shutdown()
set_on_first_rank("HVDTRAIN_DETERMINISTIC", "1")
hvd.init()
assert isinstance(context.current().world.communicator, OrderedCommunicator)
check_numbers_that_overflow()
check_without_memory_to_share()
hvd.shutdown()
report(cases=len(found), payload=found)
