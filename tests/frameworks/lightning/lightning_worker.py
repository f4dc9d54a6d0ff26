"""Lightning's Trainer on each rank: lightning_worker.py CASES."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from lightning_models import (
    QUIET,
    Adversaries,
    Normalized,
    Regression,
    Several,
    all_of,
    fit,
    loader,
    regression,
    shared_folder,
    weights,
)
from lightning_resuming import interrupted, limited, resuming
from shared_launch import run_each
from torch.utils.data import DistributedSampler

import hvdtrain.torch as hvd
from hvdtrain.lightning import HvdStrategy


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
    fit(model, regression(), sync_batchnorm=True)
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


CASES: dict[str, Callable[[], object]] = {
    function.__name__: function
    for function in (
        *(training, alone, accumulation, uneven, listed, manual, sharing, weight_exchange),
        *(batch_norm, precision, resuming, interrupted, limited, evaluation, communication),
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    hvd.init()
    run_each(CASES, sys.argv[1:])
