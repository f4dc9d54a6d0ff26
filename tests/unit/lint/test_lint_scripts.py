"""Whole scripts with several mistakes, of the kinds that tutorials show, and all that is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hvdtrain_lint.check import check_script

DDP_LOOP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def setup(options):
    options.rank = int(os.environ["RANK"])
    options.world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=options.rank, world_size=options.world_size)


def run(options):
    setup(options)
    train_data, test_data = load()
    train_part = DistributedSampler(train_data)  # HVD201
    test_part = DistributedSampler(test_data, shuffle=False)  # HVD202
    train_loader = DataLoader(train_data, options.batch // options.world_size, sampler=train_part)
    test_loader = DataLoader(test_data, options.batch // options.world_size, sampler=test_part)
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    for epoch in range(options.epochs):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss_of(model(inputs), labels).backward()
            optimizer.step()
        right = torch.tensor([count(model, test_loader)])
        everywhere = [torch.zeros_like(right) for _ in range(options.world_size)]
        if options.rank == 0:
            dist.gather(right, gather_list=everywhere)
        else:
            dist.gather(right, dst=0)
        if options.rank == 0:
            print(sum(everywhere) / len(test_data))
            scheduler.step()  # HVD104
    dist.destroy_process_group()


if __name__ == "__main__":
    run(parse())
"""
DISTRIBUTOR = """
import os
import mlflow
import torch
import torch.distributed as dist
from pyspark.ml.torch.distributor import TorchDistributor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets


def train_epoch(model, loader, optimizer, epoch):
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"epoch {epoch}: {loss.item()}")  # HVD404
            if int(os.environ["RANK"]) == 0:
                mlflow.log_metric("loss", loss.item())


def save(folder, model, epoch):
    torch.save(model.module.state_dict(), f"{folder}/{epoch}.pt")


def main(folder):
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    if rank == 0:
        mlflow.log_params({"epochs": 3})
    data = datasets.MNIST("data", train=True, download=True)  # HVD406
    loader = DataLoader(data, batch_size=100, sampler=DistributedSampler(data))  # HVD201
    model = DDP(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for epoch in range(1, 4):
        train_epoch(model, loader, optimizer, epoch)
        if rank == 0:
            save(folder, model, epoch)
    test_data = datasets.MNIST("data", train=False, download=True)  # HVD406
    loss = sum(loss_of(model(inputs), labels) for inputs, labels in DataLoader(test_data))
    mlflow.log_metric("test_loss", loss.item() / len(test_data))  # HVD403
    dist.destroy_process_group()


TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(main, "models")
"""
KERAS_FIT = """
import keras
import horovod.keras as hvd

hvd.init()
(images, labels), _ = keras.datasets.mnist.load_data(path=f"mnist-{hvd.rank()}.npz")
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
rate = 0.1 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate * hvd.size()))  # HVD302 # HVD502
model.compile(optimizer, "mse")
saving = keras.callbacks.ModelCheckpoint("model.keras")  # HVD402
model.fit(images, labels, batch_size=64, callbacks=[saving])  # HVD405
model.save("last.keras")  # HVD401
"""


@pytest.mark.parametrize("text", [DDP_LOOP, DISTRIBUTOR, KERAS_FIT])
def test_the_mistakes_of_a_script_are_found_and_nothing_else(tmp_path: Path, text: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    expected = {
        (number, code.split()[0])
        for number, line in enumerate(text.splitlines(), 1)
        for code in line.split("# ")[1:]
        if code.startswith("HVD")
    }
    assert {(each.line, each.code) for each in check_script(script)} == expected
