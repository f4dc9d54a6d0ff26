"""Small models for Lightning in float64, and how all cases train them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain.lightning  # noqa: F401
import hvdtrain.torch as hvd

GLOBAL_BATCH = 12
QUIET: Mapping[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def regression(samples: int = 90, dtype: torch.dtype = torch.float64) -> TensorDataset:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(samples))


def loader(data: TensorDataset, batch: int | None = None, **how: Any) -> DataLoader[Any]:
    return DataLoader(data, batch or GLOBAL_BATCH // hvd.size(), **how)


def fit(model: pl.LightningModule, data: TensorDataset, **how: Any) -> pl.Trainer:
    trainer = pl.Trainer(**{**QUIET, "strategy": "hvdtrain", "max_epochs": 2, **how})
    trainer.fit(model, loader(data))
    return trainer


def weights(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist()


def shared_folder() -> Path:
    """Return a new folder, the same on all ranks."""
    return Path(hvd.broadcast_object(mkdtemp() if hvd.rank() == 0 else None))


def all_of(numbers: Iterable[int]) -> list[int]:
    return sorted(chain.from_iterable(hvd.allgather_object([int(n) for n in numbers])))


class Regression(pl.LightningModule):
    """A network whose second branch is used for some batches only, and for some by one rank."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed + (hvd.rank() if hvd.is_initialized() else 0))  # rank 0's count
        self.first = torch.nn.Linear(8, 16, dtype=dtype)
        self.branch = torch.nn.Linear(8, 16, dtype=dtype)
        self.last = torch.nn.Linear(16, 1, dtype=dtype)
        self.seen: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        odd = inputs[:, :1] > 1
        if bool(odd.any()):
            hidden = hidden + self.branch(inputs) * odd
        return self.last(hidden.tanh())

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, targets, numbers = batch
        self.seen += numbers.tolist()
        loss = (self(inputs) - targets).square().mean()
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        inputs, targets, numbers = batch
        self.seen += numbers.tolist()
        errors = (self(inputs) - targets).abs()
        self.log("error", errors.mean(), sync_dist=True)
        self.log("largest", errors.max(), sync_dist=True, reduce_fx="max")

    test_step = validation_step

    def predict_step(self, batch: Any, _: int) -> Any:
        return batch[2]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Several(Regression):
    def training_step(self, batches: Any, index: int) -> torch.Tensor:
        step = super().training_step
        return torch.stack([step(batch, index) for batch in batches]).sum()


class Adversaries(Regression):
    """Two optimizers, stepped by hand, one of them on accumulated gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        inputs, targets, _ = batch
        one, other = self.optimizers()
        last = index % 2 == 1
        with one.toggle_model(sync_grad=last):
            self.manual_backward((self(inputs) - targets).square().mean() / 2)
            if last:
                self.clip_gradients(one, 0.05, "norm")
                one.step()
                one.zero_grad()
        other.zero_grad()
        self.manual_backward((self(inputs) - targets).square().mean())
        self.manual_backward((self(inputs) + targets).square().mean() / 3)
        self.clip_gradients(other, 0.1, "value")
        other.step()

    def configure_optimizers(self) -> Any:
        upper = [*self.first.parameters(), *self.branch.parameters()]
        return torch.optim.Adam(upper, 0.01), torch.optim.SGD(self.last.parameters(), 0.05)


class Normalized(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(inputs))
