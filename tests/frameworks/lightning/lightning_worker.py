"""Lightning's Trainer on small models in float64, on each rank: lightning_worker.py CASES."""

import sys
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from shared_launch import run_each
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hvdtrain.torch as hvd
from hvdtrain.lightning import HvdStrategy

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
    """Resume between batches, in the middle of an epoch and at its end."""
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
    """Resume after an exception on all ranks, in the middle of an epoch and in its last batch."""
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
    """Resume after parts of epochs, with loaders that another Trainer has used."""
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


def training() -> Any:
    """Ninety samples in batches of twelve: the last batch is short, for each number of ranks."""
    model = Regression()
    trainer = fit(model, regression(), gradient_clip_val=0.3)
    assert trainer.optimizers[0].__class__ is torch.optim.SGD
    assert type(trainer.optimizers[0]) is torch.optim.SGD
    assert [trainer.world_size, trainer.global_rank] == [hvd.size(), hvd.rank()]
    assert trainer.is_global_zero == (hvd.rank() == 0)
    return weights(model), all_of(model.seen)


def alone() -> Any:
    """The same by Lightning alone, on each rank for itself."""
    model = Regression(seed=-hvd.rank())
    data = regression()
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0)
    trainer = pl.Trainer(**QUIET, strategy="single_device", max_epochs=2, gradient_clip_val=0.3)
    trainer.fit(model, loader(data, 12, sampler=sampler))
    return weights(model)


def accumulation() -> Any:
    """Three, three and two batches a step, clipped by value."""
    model = Regression()
    fit(
        model,
        regression(),
        accumulate_grad_batches=3,
        gradient_clip_val=0.05,
        gradient_clip_algorithm="value",
    )
    return weights(model)


def uneven() -> Any:
    """One, two and three samples are left for the last batch of all ranks."""
    found = []
    for samples in (25, 26, 27):
        model = Regression()
        fit(model, regression(samples))
        found.append([weights(model), sorted(set(all_of(model.seen)))])
    return found


def listed() -> Any:
    """A list of one loader is used as that loader; several are used as Lightning uses them."""
    one, several, data = Several(), Several(), regression(29)
    how = {**QUIET, "strategy": "hvdtrain", "max_epochs": 2}
    pl.Trainer(**how).fit(one, [loader(data)])
    assert sorted(set(all_of(one.seen))) == list(range(29))
    pl.Trainer(**how).fit(several, [loader(data), loader(data)])
    sampler: DistributedSampler[Any] = DistributedSampler(data, hvd.size(), hvd.rank())
    wanted = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wanted += [*sampler] * 2
    assert sorted(several.seen) == sorted(wanted)
    return weights(one)


def sampled() -> Any:
    """A sampler of the program that draws from a random number generator of each rank."""
    model, data, how = Regression(), regression(36), {"max_epochs": 2}
    own = torch.utils.data.SubsetRandomSampler(range(24))
    pl.Trainer(**QUIET, strategy="hvdtrain", **how).fit(model, loader(data, sampler=own))
    assert all_of(model.seen) == sorted([*range(24)] * 2)
    return weights(model)


def manual() -> Any:
    model = Adversaries()
    fit(model, regression())
    return weights(model)


def sharing() -> Any:
    """Ranks share the optimizer's work, with clipping and without."""
    found = []
    for clip in (0.3, None):
        model = Regression()
        fit(model, regression(), strategy=HvdStrategy(sharded=True), gradient_clip_val=clip)
        found += weights(model)
    return found


def weight_exchange() -> Any:
    """Ranks take steps of their own, and have equal weights at the end and in checkpoints."""
    model = Regression()
    trainer = fit(model, regression(), strategy=HvdStrategy(exchange="local:steps=3"))
    trainer.save_checkpoint(shared_folder() / "last.ckpt")
    every = hvd.allgather_object(weights(model))
    assert all(each == every[0] for each in every)


def batch_norm() -> Any:
    model = Normalized()
    fit(model, regression(86), sync_batchnorm=True)  # the last batch has two samples
    assert type(model.norm) is torch.nn.BatchNorm1d
    return weights(model), [buffer.tolist() for buffer in model.norm.buffers()]


class Watched(Regression):
    """Compares the gradients of all ranks in each hook that sees them."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.hooks: set[str] = set()

    def on_after_backward(self) -> None:
        self.compare("after")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.compare("before")

    def compare(self, hook: str) -> None:
        self.hooks.add(hook)
        own = torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])
        every = hvd.allgather(own[None])
        assert torch.equal(every.nan_to_num(7.0), every[:1].nan_to_num(7.0).expand_as(every)), hook


def precision() -> Any:
    found = []
    # The first step overflows, on every number of ranks, and no other does.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-20)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    for how in ({"precision": "bf16-mixed"}, {"plugins": [plugin]}):
        model = Watched()
        fit(model, regression(dtype=torch.float32), gradient_clip_val=0.3, **how)
        assert model.hooks == {"after", "before"}
        found.append(weights(model))
    assert scaler.get_scale() == 2.0**10
    return found


class Measured(Regression):
    """A network with a metric of torchmetrics, which the strategy tells of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)
        self.kept = torchmetrics.CatMetric()

    def test_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.metric(self(batch[0]), batch[1])
        self.kept.update(batch[2])
        self.log("metric", self.metric)

    def on_test_epoch_end(self) -> None:
        self.numbers = sorted(self.kept.compute().tolist())


def evaluation() -> Any:
    """Twenty-three samples: each is evaluated once, though ranks differ in their batches."""
    trainer = pl.Trainer(**QUIET, strategy="hvdtrain")
    model = Measured()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", append=True)
        (found,) = trainer.test(model, loader(regression(23), 4), verbose=False)
    assert not any("DistributedSampler" in str(warning.message) for warning in said)
    seen = all_of(model.seen)
    predicted = [n for batch in trainer.predict(model, loader(regression(23), 4)) for n in batch]
    assert seen == all_of(predicted) == model.numbers == list(range(23))
    return found


def communication() -> Any:
    strategy = HvdStrategy()
    strategy.set_world_ranks()
    rank, size = hvd.rank(), hvd.size()
    own = torch.tensor([rank + 1.0])
    every = torch.arange(1.0, size + 1)
    mean = torch.distributed.ReduceOp.AVG
    assert strategy.reduce(own) == strategy.reduce(own, reduce_op=mean) == every.mean()
    assert strategy.reduce(own, reduce_op="sum") == every.sum()
    assert strategy.reduce(own, reduce_op=torch.distributed.ReduceOp.MAX) == size
    assert strategy.reduce(torch.tensor(rank + 4)) == every.double().mean() + 3  # not rounded
    assert strategy.reduce("text") == "text"
    assert strategy.broadcast({"from": rank}, src=size - 1) == {"from": size - 1}
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert strategy.reduce_boolean_decision(rank == 0) == (size == 1)
    assert torch.equal(strategy.all_gather(own), every[:, None])
    leaf = own.clone().requires_grad_()
    (strategy.all_gather(leaf, sync_grads=True).sum() * (rank + 1)).backward()
    assert leaf.grad == every.sum()  # the sum of what all ranks ask for
    for group, op in ((None, "median"), ("world", "sum")):
        with pytest.raises(ValueError, match="must be"):
            strategy.reduce(own, group, op)
    strategy.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    run_each(globals(), sys.argv[1:])
