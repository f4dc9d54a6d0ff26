"""Accelerate, as it is, under `python -m hvdtrain exec` in place of `accelerate launch`."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
arguments = parser.parse_args()

accelerator = Accelerator()
torch.manual_seed(0)
data = load_digits()
batch_size = arguments.batch_size // accelerator.num_processes


def loader_of(samples: object, shuffle: bool) -> DataLoader[object]:
    """Return a loader of samples for one process; Accelerate divides it among the ranks."""
    tensors = TensorDataset(torch.from_numpy(samples.inputs), torch.from_numpy(samples.labels))
    return DataLoader(tensors, batch_size, shuffle=shuffle)


model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 36, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.004)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)
train, test = loader_of(data.train, shuffle=True), loader_of(data.test, shuffle=False)
# Not the schedule: a prepared one takes as many steps as there are ranks.
prepared, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for _ in range(arguments.epochs):
    for images, labels in train:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(prepared(images), labels))
        optimizer.step()
    schedule.step()

hits = 0
with torch.no_grad():
    for images, labels in test:
        pair = (prepared(images).argmax(dim=1), labels)
        guesses, labels = accelerator.gather_for_metrics(pair)  # without what was padded
        hits += int((guesses == labels).sum())
accuracy = hits / len(data.test)
accelerator.print(f"test accuracy {accuracy:.2%} on {accelerator.num_processes} ranks")
model = accelerator.unwrap_model(prepared)
accelerator.wait_for_everyone()
accelerator.end_training()
