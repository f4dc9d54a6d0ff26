"""Lightning: a Trainer whose strategy is "hvdtrain", in place of "ddp"."""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain.lightning  # noqa: F401 - adds the strategy "hvdtrain"
from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
arguments = parser.parse_args()

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(L.LightningModule):
    """A network that tells digits apart."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU()
        self.network = torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        """Return the mean loss over a batch."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def test_step(self, batch: Batch, index: int) -> None:
        """Log the accuracy, which is averaged over the samples of all ranks."""
        images, labels = batch
        hits = (self.network(images).argmax(dim=1) == labels).float()
        self.log("accuracy", hits.mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Scale the learning rate: Lightning leaves it as it is."""
        learning_rate = 0.05 * self.trainer.world_size
        return torch.optim.SGD(self.parameters(), lr=learning_rate, momentum=0.9)


L.seed_everything(1, verbose=False)
data = load_digits()
samples, test_samples = (
    TensorDataset(torch.from_numpy(part.inputs), torch.from_numpy(part.labels))
    for part in (data.train, data.test)
)
model = Digits()
trainer = L.Trainer(
    strategy="hvdtrain",
    max_epochs=arguments.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(samples, arguments.batch_size, shuffle=True))
(result,) = trainer.test(model, DataLoader(test_samples, 100), verbose=False)
accuracy = result["accuracy"]
if trainer.is_global_zero:
    print(f"test accuracy {accuracy:.2%} on {trainer.world_size} ranks")
