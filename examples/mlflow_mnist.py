"""PyTorch with MLflow: train on all ranks, log and save on one, load, test, log the model."""

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
parser.add_argument(
    "--data-dir", type=Path, help="directory with the MNIST files; default: train on digits"
)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="over all ranks")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--log-interval", type=int, default=10, help="in steps")
parser.add_argument(
    "--tracking-uri", help="default: MLFLOW_TRACKING_URI, or mlflow.db in the current directory"
)
parser.add_argument("--experiment", default="mnist")


class Net(torch.nn.Module):
    """Two convolutional and two fully connected layers, for 28 x 28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = torch.nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = torch.nn.Dropout2d()
        self.fc1 = torch.nn.Linear(320, 50)
        self.fc2 = torch.nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, float32 [n, 10], of images, float32 [n, 1, 28, 28]."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = functional.relu(self.fc1(x.flatten(1)))
        x = functional.dropout(x, training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def load_samples(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and test samples: MNIST, or scikit-learn's digits scaled to its size."""
    data = load_mnist(data_dir) if data_dir else load_digits()
    return resized(data.train), resized(data.test)


def resized(samples: Samples) -> TensorDataset:
    """Return the samples with their images scaled to 28 x 28."""
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
            mean = hvd.allreduce(loss.detach(), name="loss").item()  # over all ranks
            if hvd.rank() == 0:
                mlflow.log_metric("train_loss", mean, step=epoch * len(loader) + index)


def test(samples: TensorDataset, checkpoint: Path) -> tuple[Net, float]:
    """Load a checkpoint; return the model and its accuracy. Each rank tests its share."""
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
        # Saved as a graph instead of a pickle, so that loading it does not execute arbitrary code.
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
if torch.cuda.is_available():  # each rank uses its own
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

directory = Path(hvd.broadcast_object(f"mnist-{time.strftime('%Y%m%d-%H%M%S')}", root_rank=0))
run: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if hvd.rank() == 0:  # only one rank logs to MLflow
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
    hvd.barrier()  # wait until the checkpoint is written
    model, accuracy = test(test_samples, directory / f"checkpoint-{arguments.epochs}.pt")
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.2%} on {hvd.size()} ranks")
