"""The usual training script for Horovod, on made data. It knows nothing of hvdtrain."""

import argparse
import json

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from points import Net, Points
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--start-method")
parser.add_argument("--out", required=True)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model: Net, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for data, target in loader:
        if torch.cuda.is_available():
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model: Net, loader: DataLoader, sampler: DistributedSampler) -> None:
    model.eval()
    loss, correct = 0.0, 0.0
    for data, target in loader:
        if torch.cuda.is_available():
            data, target = data.cuda(), target.cuda()
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        correct += output.argmax(dim=1).eq(target).float().sum().item()
    loss = metric_average(loss / len(sampler), "avg_loss")
    accuracy = metric_average(correct / len(sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(json.dumps({"loss": loss, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(hvd.rank())
    torch.set_num_threads(1)

    workers = {}
    if args.start_method:
        workers = {"num_workers": 1, "multiprocessing_context": args.start_method}
    train_data, test_data = Points(48, seed=1), Points(24, seed=2)
    train_sampler: DistributedSampler = DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    train_loader = DataLoader(train_data, args.batch_size, sampler=train_sampler, **workers)
    test_sampler: DistributedSampler = DistributedSampler(
        test_data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    test_loader = DataLoader(test_data, args.batch_size, sampler=test_sampler)

    model = Net()
    if torch.cuda.is_available():
        model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        test(model, test_loader, test_sampler)
    torch.save(model.state_dict(), f"{args.out}/{hvd.rank()}.pt")
