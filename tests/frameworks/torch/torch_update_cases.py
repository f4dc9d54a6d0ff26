"""Steps of the training loop, and what watches them, against one process with all samples."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch_training import Model, batch, build, difference, momentum, own, refused, together

import hvdtrain.torch as hvd
from hvdtrain.errors import UsageError
from hvdtrain.train.loop.replica_check import replica_difference
from hvdtrain.train.optimizers.layerwise import Lamb, Lars
from hvdtrain.train.torch.state import torch_checksums
from hvdtrain.train.torch.update import Precision, StepResult, Updater, non_finite_cause

CPU = torch.device("cpu")
STEPS, DECAY = 4, 0.75
Samples = tuple[torch.Tensor, torch.Tensor]
# Each with a norm that some steps exceed and others do not.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": momentum,
    "lars": lambda p: Lars(p, lr=5.0, weight_decay=0.01, trust_coefficient=0.02),
    "lamb": lambda p: Lamb(p, lr=0.02, weight_decay=0.01),
}


def is_last() -> bool:
    return hvd.rank() == hvd.size() - 1


def parts_of(step: int) -> list[Samples]:
    """Return this rank's samples of a step in 1 to 3 uneven parts; the last rank may have none."""
    inputs, labels = batch(step)
    givers = hvd.size() - 1 if step == 1 and hvd.size() > 1 else hvd.size()
    if hvd.rank() >= givers:
        return [(inputs[:0], labels[:0])]
    inputs, labels = inputs[hvd.rank() :: givers], labels[hvd.rank() :: givers]
    cuts = [1, 2, len(labels)][: (hvd.rank() + step) % 3] or [len(labels)]
    pieces = torch.arange(len(labels)).tensor_split(sorted({*cuts, 3}))
    return [(inputs[piece], labels[piece]) for piece in pieces]


def take_step(updater: Updater, model: Model, parts: Iterable[Samples]) -> StepResult:
    parts = list(parts)
    updater.begin([len(labels) for _, labels in parts])
    for inputs, labels in parts:
        if len(labels):
            with updater.precision.autocast():
                loss = F.cross_entropy(model(inputs), labels)
            updater.backward(loss, len(labels))
    return updater.step()


def clip_alone(model: Model, largest: float) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    for gradient in gradients:
        gradient.mul_(min(1.0, largest / norm))
    return norm


def parts_of_any_size_give_the_gradient_of_the_whole_batch() -> None:
    for name, make in OPTIMIZERS.items():
        alone = build()
        optimizer, largest = make(list(alone.parameters())), 0.0
        averaged: list[torch.Tensor] = []
        norms: list[float] = []
        for step in range(STEPS):
            inputs, labels = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(alone(inputs), labels).backward()
            largest = largest or 1.02 * clip_alone(alone, math.inf)
            norms.append(clip_alone(alone, largest))
            optimizer.step()
            weights = [p.detach().clone() for p in alone.parameters()]
            old = averaged or weights
            averaged = [DECAY * a + (1 - DECAY) * w for a, w in zip(old, weights, strict=True)]
        assert min(norms) < largest < max(norms)
        for sharded in (False, True)[: 2 if name == "sgd" else 1]:
            model, distributed = together(make, sharded=sharded)
            updater = Updater(model, distributed, Precision("none", CPU), largest, DECAY)
            updates = [take_step(updater, model, parts_of(step)) for step in range(STEPS)]
            assert difference(model, alone) < 1e-12
            assert np.allclose([update.norm for update in updates], norms, rtol=1e-12)
            assert not any(update.skipped for update in updates)
            assert updater.averaged is not None
            for own_average, expected in zip(updater.averaged.parameters(), averaged, strict=True):
                assert float((own_average.detach() - expected).abs().max()) < 1e-12
            assert replica_difference(torch_checksums(model, distributed)) is None


def sparse_gradients_are_clipped_as_dense_ones_are() -> None:
    results = []
    for sparse in (True, False):
        table = torch.nn.Embedding(4, 2, sparse=sparse, dtype=torch.float64)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        updater = Updater(table, optimizer, Precision("none", CPU), clip_norm=0.5)
        rows = torch.tensor([hvd.rank(), 3, 3])
        updater.begin([3])
        updater.backward(table(rows).sum(), 3)
        results.append((updater.step().norm, table.weight.detach()))

        def poisoned(table: Any = table, rows: Any = rows) -> torch.Tensor:
            values = table(rows)
            result: torch.Tensor = (values - values.detach()).sqrt().sum()
            return result

        assert "'weight'" in non_finite_cause(1, table, [poisoned])
    (norm, weight), (dense_norm, dense_weight) = results
    assert math.isclose(norm, dense_norm, rel_tol=1e-12)
    assert torch.allclose(weight, dense_weight, rtol=1e-12)
    assert math.isclose(float(weight.norm()), 0.5)


def fp16_skips_a_step_on_all_ranks_and_tells_a_fault_from_a_large_scale() -> None:
    for sharded in (False, True):
        _skip_steps(sharded)


def averages_that_would_not_move_are_refused() -> None:
    model, optimizer = together(momentum)
    plain = Precision("none", CPU)
    for kind, decay, fewer in ((torch.bfloat16, 0.999, 0.99), (torch.float16, 0.9995, 0.999)):
        model.to(kind)
        text = refused(UsageError, partial(Updater, model, optimizer, plain, None, decay))
        assert f"--ema {decay}: an average in {kind}" in text
        Updater(model, optimizer, plain, ema=fewer)
    Updater(model.requires_grad_(False), optimizer, plain, ema=0.9999)


def _skip_steps(sharded: bool) -> None:
    torch.manual_seed(0)
    model = Model(torch.nn.Linear(4, 3))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, sharded=sharded)
    updater = Updater(model, optimizer, Precision("fp16", CPU), ema=DECAY)
    scaler, averaged = updater.precision.scaler, updater.averaged
    assert scaler is not None
    assert averaged is not None
    inputs, labels = batch(0)[0].flatten(1)[:, :4].float(), batch(0)[1] % 3
    whole = F.cross_entropy(model(inputs), labels)
    expected = torch.autograd.grad(whole, list(model.parameters()))

    def one_step(factor: float) -> tuple[StepResult, bool, float]:
        """Step on a loss that the last rank multiplies; return whether the weights changed."""
        before = [p.detach().clone() for p in [*model.parameters(), *averaged.parameters()]]
        updater.begin([len(own(labels))])
        with updater.precision.autocast():
            outputs = model(own(inputs))
            assert outputs.dtype == torch.float16
            loss = F.cross_entropy(outputs, own(labels))
        updater.backward(loss * factor if is_last() else loss, len(own(labels)))
        update = updater.step()
        after = [*model.parameters(), *averaged.parameters()]
        changed = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return update, changed, scaler.get_scale()

    update, changed, scale = one_step(1.0)
    assert (update.skipped, update.fault, changed, scale) == (False, False, True, 65536)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected))
    assert math.isclose(update.norm, norm, rel_tol=1e-2)
    update, changed, scale = one_step(1e35)  # which overflows when it is scaled, and only then
    assert (update.skipped, update.fault, changed, scale) == (True, False, False, 32768)
    update, changed, scale = one_step(math.nan)
    assert (update.skipped, update.fault, changed, scale) == (True, True, False, 16384)
    assert not math.isfinite(update.norm)
    update, changed, scale = one_step(1.0)
    assert (update.skipped, changed, scale) == (False, True, 16384)
    assert replica_difference(torch_checksums(model, optimizer, {"scale": scale})) is None


def what_is_not_finite_is_found_on_its_rank() -> None:
    norm = torch.nn.BatchNorm1d(3)
    model = Model(torch.nn.Linear(3, 3), norm, torch.nn.Linear(3, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    updater = Updater(model, optimizer, Precision("none", CPU))
    inputs, last = torch.randn(4, 3), hvd.size() - 1

    def loss_of(factor: float) -> torch.Tensor:
        squares: torch.Tensor = model(inputs).square()
        return torch.sqrt(squares.sum() * factor) if is_last() else squares.mean()

    updater.begin([4])
    updater.backward(loss_of(0.0), 4)  # a root has no slope at 0, and 0 times infinity is none
    update = updater.step()
    assert (update.skipped, update.fault) == (True, True)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert norm.num_batches_tracked == 1
    text = non_finite_cause(12, model, [lambda: loss_of(1.0), lambda: loss_of(0.0)])
    assert text == f"step 12: the gradient of '0.weight' is not finite on rank {last}"
    assert all(torch.equal(kept[name], buffer) for name, buffer in model.named_buffers())
    text = non_finite_cause(13, model, [lambda: loss_of(math.nan)])
    assert text == f"step 13: the loss is nan on rank {last}"
    assert "though each rank's own is" in non_finite_cause(14, model, [lambda: loss_of(1.0)])
