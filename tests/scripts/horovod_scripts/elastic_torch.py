"""A script in the shape of Horovod's elastic example for PyTorch, of which a rank is killed."""

from __future__ import annotations

import argparse
import os
import signal

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from points import Net, Points
from ranks import report
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--victim", type=int, required=True)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
started = hvd.size()

train_data = Points(24, seed=1)
train_sampler: DistributedSampler = DistributedSampler(
    train_data, num_replicas=hvd.size(), rank=hvd.rank()
)
train_loader = DataLoader(train_data, args.batch_size, sampler=train_sampler)
test_data = Points(12, seed=2)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)


def metric_average(value: float, name: str) -> float:
    """Return the average over the ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


def perhaps_end(state: hvd.elastic.TorchState) -> None:
    """Be killed in the middle of the second epoch, if this rank is the victim."""
    if hvd.size() == started and hvd.rank() == args.victim and (state.epoch, state.batch) == (2, 2):
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Train for the epochs that are left, and commit after each batch."""
    for state.epoch in range(state.epoch, args.epochs + 1):  # noqa: B020
        state.model.train()
        train_sampler.set_epoch(state.epoch)
        steps_remaining = len(train_loader) - state.batch
        for state.batch, (data, target) in enumerate(train_loader):
            if state.batch >= steps_remaining:
                break
            state.optimizer.zero_grad()
            loss = F.nll_loss(state.model(data), target)
            loss.backward()
            perhaps_end(state)
            state.optimizer.step()
            state.commit()
        state.batch = 0


def test() -> float:
    """Return the loss on the ranks' parts of other data."""
    model.eval()
    own = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        loss = F.nll_loss(model(test_data.points[own]), test_data.classes[own]).item()
    return metric_average(loss, "avg_loss")


optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    op=hvd.Average,
)


def on_state_reset() -> None:
    """Have the learning rate follow the number of ranks."""
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
assert (hvd.allgather(weights[None], name="weights") == weights).all()
rate = optimizer.param_groups[0]["lr"] / args.lr
report(1, {"ranks": hvd.size(), "loss": test(), "rate": rate})
