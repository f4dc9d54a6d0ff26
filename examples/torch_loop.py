"""PyTorch: a loop with a DistributedSampler, in place of DistributedDataParallel."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdtrain.torch as hvd
from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
device = torch.device("cpu")
if torch.cuda.is_available():  # each rank uses its own
    device = torch.device("cuda", hvd.local_rank())
    torch.cuda.set_device(device)

data = load_digits()
samples = TensorDataset(torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.labels))
sampler: DistributedSampler[object] = DistributedSampler(samples, hvd.size(), hvd.rank())
loader = DataLoader(samples, arguments.batch_size // hvd.size(), sampler=sampler)

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 36, 10),
).to(device)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        scores = model(images.to(device))
        torch.nn.functional.cross_entropy(scores, labels.to(device)).backward()
        optimizer.step()
    schedule.step()  # on every rank

# Each rank tests its own samples, each of them once.
mine = slice(hvd.rank(), None, hvd.size())
with torch.no_grad():
    guesses = model(torch.from_numpy(data.test.inputs[mine]).to(device)).argmax(dim=1).cpu()
hits = (guesses == torch.from_numpy(data.test.labels[mine])).sum()
accuracy = int(hvd.allreduce(hits, op=hvd.Sum, name="hits")) / len(data.test)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.2%} on {hvd.size()} ranks")
