"""Train a model of some MiB in each way in which ranks of a node can meet.

What one rank makes of all samples is computed here as well.
"""

from __future__ import annotations

import os

import torch
from ranks import report
from torch.nn import Linear, ReLU, Sequential

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.engines.mpi_communicator import MpiCommunicator
from hvdtrain.engines.node_team import NodeTeam

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
    team = communicator._team if hierarchy is None else hierarchy._team
    if team is None:
        return "0"
    return "1" if isinstance(team, NodeTeam) else "numpy"


torch.set_num_threads(1)
os.environ["HVDTRAIN_BUCKET_BYTES"] = str(2 << 20)
alone: torch.Tensor | None = None
found: dict[str, float] = {}
for way in WAYS:
    os.environ["HVDTRAIN_SHARED_MEMORY"] = way
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
    hvd.shutdown()
report(cases=len(found), payload=found)
