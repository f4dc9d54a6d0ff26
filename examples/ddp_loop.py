"""DistributedDataParallel, as it is, under `python -m hvdtrain exec` in place of torchrun."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
arguments = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
device = torch.device("cpu")
if torch.cuda.is_available():  # each rank uses its own
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

data = load_digits()
samples = TensorDataset(torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.labels))
sampler: DistributedSampler[object] = DistributedSampler(samples)
loader = DataLoader(samples, arguments.batch_size // size, sampler=sampler)

plain = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 36, 10),
).to(device)
model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)

for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        scores = model(images.to(device))
        torch.nn.functional.cross_entropy(scores, labels.to(device)).backward()
        optimizer.step()
    schedule.step()  # on every rank

# A DistributedSampler would give some samples to two ranks, so that all have equally many.
mine = slice(rank, None, size)
with torch.no_grad():
    guesses = plain(torch.from_numpy(data.test.inputs[mine]).to(device)).argmax(dim=1).cpu()
hits = (guesses == torch.from_numpy(data.test.labels[mine])).sum().to(device)
dist.all_reduce(hits)
accuracy = int(hits) / len(data.test)
if rank == 0:
    print(f"test accuracy {accuracy:.2%} on {size} ranks")
model = plain
dist.barrier()  # rank 0 serves the others' connections
dist.destroy_process_group()
