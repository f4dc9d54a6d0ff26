"""PyTorch and MLflow: train on all ranks, log and save on one, load, test, log the model."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import mlflow
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdtrain.torch as hvd
from hvdtrain.data.dataset import Samples
from hvdtrain.data.digits import load_digits
from hvdtrain.data.idx import load_mnist

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, help="holds the files of MNIST; else: digits")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="of all ranks")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--log-interval", type=int, default=10, help="steps")
parser.add_argument("--tracking-uri", help="else MLFLOW_TRACKING_URI, or mlflow.db here")
parser.add_argument("--experiment", default="mnist")


class Net(torch.nn.Module):
    """Two convolutions and two layers, for images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = torch.nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = torch.nn.Dropout2d()
        self.fc1 = torch.nn.Linear(320, 50)
        self.fc2 = torch.nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logarithms of probabilities, [n, 10]."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = functional.relu(self.fc1(x.flatten(1)))
        x = functional.dropout(x, training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def load_samples(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test samples: MNIST's, or scikit-learn's digits made as large."""
    data = load_mnist(data_dir) if data_dir else load_digits()
    return as_large(data.train), as_large(data.test)


def as_large(samples: Samples) -> TensorDataset:
    images = functional.interpolate(torch.from_numpy(samples.inputs), size=28, mode="bilinear")
    return TensorDataset(images, torch.from_numpy(samples.labels))


def train(samples: TensorDataset, directory: Path) -> None:
    model = Net().to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=arguments.momentum),
        named_parameters=model.named_parameters(),
    )
    sampler: DistributedSampler[object] = DistributedSampler(samples, hvd.size(), hvd.rank())
    loader = DataLoader(samples, arguments.batch_size // hvd.size(), sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, epoch)
        if hvd.rank() == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                directory / f"checkpoint-{epoch + 1}.pt",
            )


def train_one_epoch(
    model: Net, loader: DataLoader[object], optimizer: torch.optim.Optimizer, epoch: int
) -> None:
    model.train()
    for index, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        if index % arguments.log_interval == 0:
            mean = hvd.allreduce(loss.detach(), name="loss").item()  # of all ranks
            if hvd.rank() == 0:
                mlflow.log_metric("train_loss", mean, step=epoch * len(loader) + index)


def test(samples: TensorDataset, checkpoint: Path) -> tuple[Net, float]:
    """Load a checkpoint, and return the model and its accuracy: each rank tests its share."""
    model = Net().to(device)
    model.load_state_dict(torch.load(checkpoint, map_location=device, weights_only=True)["model"])
    model.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in samples.tensors)
    with torch.no_grad():
        scores = model(images)
    sums = torch.stack(
        [
            functional.nll_loss(scores, labels, reduction="sum"),
            (scores.argmax(dim=1) == labels).sum().float(),
        ]
    )
    loss, hits = (hvd.allreduce(sums, op=hvd.Sum, name="test") / len(samples)).tolist()
    if hvd.rank() == 0:
        mlflow.log_metrics({"test_loss": loss, "test_accuracy": hits}, step=arguments.epochs)
        # A graph instead of a pickle: loading it runs no code of whoever wrote it.
        mlflow.pytorch.log_model(
            model.cpu(),
            name="model",
            input_example=samples.tensors[0][:2].numpy(),
            serialization_format="pt2",
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        )
    return model, hits


arguments = parser.parse_args()
hvd.init()
torch.manual_seed(hvd.rank())
device = torch.device("cpu")
if torch.cuda.is_available():  # each rank takes one
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

directory = Path(hvd.broadcast_object(f"mnist-{time.strftime('%Y%m%d-%H%M%S')}", root_rank=0))
run: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if hvd.rank() == 0:  # MLflow knows one rank only
    directory.mkdir()
    if arguments.tracking_uri:
        mlflow.set_tracking_uri(arguments.tracking_uri)
    mlflow.set_experiment(arguments.experiment)
    run = mlflow.start_run(run_name=directory.name)

with run:
    if hvd.rank() == 0:
        names = ("epochs", "batch_size", "lr", "momentum")
        mlflow.log_params({name: getattr(arguments, name) for name in names})
        mlflow.log_param("ranks", hvd.size())
    train_samples, test_samples = load_samples(arguments.data_dir)
    train(train_samples, directory)
    hvd.barrier()  # the checkpoint is there
    model, accuracy = test(test_samples, directory / f"checkpoint-{arguments.epochs}.pt")
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.2%} on {hvd.size()} ranks")
