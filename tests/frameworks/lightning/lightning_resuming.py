"""Cases of lightning_worker.py: trainings that stop and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from lightning_models import (
    QUIET,
    Regression,
    Several,
    all_of,
    fit,
    loader,
    regression,
    shared_folder,
    weights,
)

import hvdtrain.torch as hvd

EPOCHS = 3
# Steps, of eight in an epoch, and workers.
POINTS = ((12, 0), (12, 2), (16, 2))


class CountingIO(TorchCheckpointIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def save_checkpoint(self, *args: Any, **how: Any) -> None:
        self.written += 1
        super().save_checkpoint(*args, **how)


class Breaking(Regression):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == self.step:
            raise RuntimeError("broken here")
        return super().training_step(batch, index)


def resume(path: Path, workers: int) -> Any:
    """Train from a checkpoint to the end; return the weights, and the samples of all ranks."""
    model = Regression(seed=5)
    trainer = pl.Trainer(**QUIET, strategy="hvdtrain", max_epochs=EPOCHS)
    trainer.fit(model, loader(regression(), num_workers=workers), ckpt_path=path)
    return weights(model), all_of(model.seen)


def resuming() -> Any:
    """Go on after batches, in the middle of an epoch and at its end."""
    folder = shared_folder()
    kept = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    files = CountingIO()
    model = Regression()
    how = {"enable_checkpointing": True, "max_epochs": EPOCHS, "plugins": [files]}
    fit(model, regression(), callbacks=[kept], **how)
    assert (files.written > 0) == (hvd.rank() == 0), files.written
    paths = {step: next(folder.glob(f"*step={step}.ckpt")) for step in (12, 16)}
    return weights(model), [resume(paths[step], workers) for step, workers in POINTS]


def interrupted() -> Any:
    """Go on after an exception on all ranks, in the middle of an epoch and in its last batch."""
    folder = shared_folder()
    model = Regression()
    fit(model, regression(), max_epochs=EPOCHS)
    states = []
    for step in (12, 15):
        kept = [OnExceptionCheckpoint(folder, str(step))]
        how = {"enable_checkpointing": True, "max_epochs": EPOCHS, "callbacks": kept}
        with pytest.raises(RuntimeError, match="broken here"):
            fit(Breaking(step), regression(), **how)
        states.append(resume(folder / f"{step}.ckpt", 2))
    return weights(model), states


def limited() -> Any:
    """Go on after parts of epochs, with loaders that another Trainer has used."""
    folder = shared_folder()
    how = {**QUIET, "strategy": "hvdtrain", "max_epochs": 2, "limit_train_batches": 5}
    kept = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    loaders = CombinedLoader([loader(regression(), num_workers=2)])
    model = Several()
    pl.Trainer(**{**how, "enable_checkpointing": True}, callbacks=[kept]).fit(model, loaders)
    for step in (5, 8):
        resumed = Several(seed=5)
        (path,) = folder.glob(f"*step={step}.ckpt")
        pl.Trainer(**how).fit(resumed, loaders, ckpt_path=path)
        assert weights(resumed) == pytest.approx(weights(model), rel=1e-12), step
    return weights(model)
