"""Ranks started from Python or a notebook, in place of Spark's TorchDistributor; logs to MLflow."""

from __future__ import annotations

import argparse
from pathlib import Path

import mlflow
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdtrain
from hvdtrain.data.dataset import Samples
from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("-np", "--num-ranks", type=int, default=2)
parser.add_argument("--hosts", help="as in node1:4,node2:4; default: this host")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--directory", type=Path, default=Path.cwd(), help="which all hosts share")


def network() -> nn.Module:
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
    return nn.Sequential(*layers)


def tensors(samples: Samples) -> TensorDataset:
    return TensorDataset(torch.from_numpy(samples.inputs), torch.from_numpy(samples.labels))


def train(run_id: str, checkpoint: Path, epochs: int) -> int:
    """Train on one of the ranks, and return the number of its samples in an epoch."""
    dist.init_process_group("gloo")  # finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    torch.manual_seed(0)
    samples = tensors(load_digits().train)
    sampler: DistributedSampler[object] = DistributedSampler(samples)
    loader = DataLoader(samples, 32 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:  # one rank logs and saves
            client = mlflow.tracking.MlflowClient()
            client.log_metric(run_id, "train_loss", float(mean), step=epoch)
            torch.save(model.module.state_dict(), checkpoint)
    dist.barrier()
    dist.destroy_process_group()
    return len(sampler)


def test(checkpoint: Path) -> float:
    """Return the accuracy of a checkpoint, in this process."""
    model = network()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    images, labels = tensors(load_digits().test).tensors
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


if __name__ == "__main__":
    arguments = parser.parse_args()
    mlflow.set_experiment("digits")
    for ranks in (1, arguments.num_ranks):  # the loop by itself first
        with mlflow.start_run(run_name=f"{ranks} ranks") as run:
            mlflow.log_params({"epochs": arguments.epochs, "ranks": ranks})
            checkpoint = arguments.directory / f"digits-{ranks}.pt"
            call = (run.info.run_id, checkpoint, arguments.epochs)
            hosts = arguments.hosts if ranks > 1 else None
            counts = hvdtrain.run(train, args=call, np=ranks, hosts=hosts)
            accuracy = test(checkpoint)
            mlflow.log_metric("test_accuracy", accuracy)
        print(f"test accuracy {accuracy:.2%} on {ranks} ranks, of {counts} samples")
