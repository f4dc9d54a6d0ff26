"""Training steps with each library, and their overhead over a step without communication."""

from __future__ import annotations

import gc
from functools import partial
from itertools import product
from math import isclose, isfinite
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import hvdtrain.torch as hvd
from hvdtrain_bench.cases.horovod import Horovod
from hvdtrain_bench.cases.models import MODELS, BenchModel
from hvdtrain_bench.cases.peers import Peers
from hvdtrain_bench.cases.sums import WrongResultError
from hvdtrain_bench.cases.trainer import Trainer, Wrap, bare_optimizer, first_weights
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.settings import OPTIMIZERS
from hvdtrain_bench.harness.turns import Bench, Contender

_ALONE, _WHOLE, _LIMIT = "one rank alone", "one rank, whole batch", "no communication"
_BASE, _AGAIN = "hvdtrain", "hvdtrain again"
_FUSED_LIMIT, _FUSED, _SHARDED = "no communication, fused", "hvdtrain, fused", "hvdtrain, sharded"
# Libraries add in different orders, which makes little difference after a few steps.
_AGREEMENT = 1e-4


def measure_steps(bench: Bench, peers: Peers) -> None:
    """Time a step of each model with every library (collective)."""
    bench.result.skipped.update(peers.skipped)
    settings = bench.settings
    for key, factor, optimizer in product(settings.models, settings.batches, settings.optimizers):
        model = MODELS[key]
        samples = factor * model.batch
        suffix = "" if optimizer == OPTIMIZERS[0] else f", {optimizer}"
        name = f"{model.title}, {samples} samples per rank{suffix}"
        bench.say(name)
        contenders = _contenders(bench.ranks, peers, model, samples, optimizer)
        seconds = bench.take_turns(contenders, fewest_calls=settings.steps_per_turn)
        del contenders
        gc.collect()  # models, their hooks and their process groups' buffers
        about: dict[str, Any] = {
            "model": key,
            "title": model.title,
            "samples": samples,
            "optimizer": optimizer,
        }
        bench.add(name, seconds, _BASE, _AGAIN, **about)


def with_hvdtrain(
    module: nn.Module, kind: str = "sgd", fused: bool | None = None, sharded: bool = False
) -> tuple[nn.Module, Optimizer]:
    """Return the model and its optimizer for training with hvdtrain.torch (collective)."""
    named = module.named_parameters()
    optimizer = bare_optimizer(module, kind, fused)
    return module, hvd.DistributedOptimizer(optimizer, named_parameters=named, sharded=sharded)


def _with_horovod(horovod: Horovod, module: nn.Module, kind: str) -> tuple[nn.Module, Optimizer]:
    named = module.named_parameters()
    optimizer = bare_optimizer(module, kind)
    return module, horovod.hvd.DistributedOptimizer(optimizer, named_parameters=named)


def _with_ddp(module: nn.Module, kind: str) -> tuple[nn.Module, Optimizer]:
    # Its default also broadcasts the buffers of batch normalization, which the others do not.
    parallel = DistributedDataParallel(
        module, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    return parallel, bare_optimizer(module, kind)


def _contenders(
    ranks: Ranks, peers: Peers, model: BenchModel, samples: int, kind: str
) -> list[Contender]:
    weights = first_weights(model)
    batches = [model.make_batch(samples, seed=rank) for rank in range(ranks.size)]
    own = batches[ranks.rank]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    del batches
    judge = _Judge(ranks, model.exact)

    def trainer(wrap: Wrap) -> Trainer:
        return Trainer(model, weights, own, wrap, seed=ranks.rank)

    def bare(module: nn.Module, fused: bool | None = None) -> tuple[nn.Module, Optimizer]:
        return module, bare_optimizer(module, kind, fused)

    ours = partial(with_hvdtrain, kind=kind)
    torch_library = f"torch {torch.__version__}"
    alone = trainer(bare)
    whole = Trainer(model, weights, (inputs, targets), bare, seed=0)
    found = [
        judge.on_root(_WHOLE, torch_library, whole),
        judge.on_root(_ALONE, torch_library, alone),
        judge.without_communication(_LIMIT, torch_library, alone),
        judge.together(_BASE, peers.library, trainer(ours)),
        judge.together(_AGAIN, peers.library, trainer(ours)),
        judge.without_communication(
            _FUSED_LIMIT, torch_library, trainer(partial(bare, fused=True))
        ),
        judge.together(_FUSED, peers.library, trainer(partial(ours, fused=True))),
        judge.together(_SHARDED, peers.library, trainer(partial(ours, sharded=True))),
        judge.together("DDP", peers.gloo_library, trainer(partial(_with_ddp, kind=kind))),
    ]
    if peers.horovod is not None:
        horovod = peers.horovod
        wrap = partial(_with_horovod, horovod, kind=kind)
        contender = judge.together("Horovod", horovod.library, trainer(wrap))
        contender.turn = horovod.turn
        found.append(contender)
    return found


class _Judge:
    """Turns trainers into contenders, and compares their final weights."""

    def __init__(self, ranks: Ranks, exact: bool) -> None:
        # Whether all ranks together take the same steps as one rank with the whole batch.
        self._ranks, self._exact = ranks, exact
        self._expected: dict[int, tuple[str, float]] = {}

    def together(self, name: str, library: str, trainer: Trainer) -> Contender:
        """Return a contender in which all ranks train and average their gradients."""

        def check(calls: int) -> None:
            trainer.drop_gradients()
            self._compare(name, calls, self._ranks.all_of(trainer.moved()))

        return Contender(name, library, trainer.restart, trainer.step, check, meets=True)

    def without_communication(self, name: str, library: str, trainer: Trainer) -> Contender:
        """Return a contender in which all ranks train at once, each on its own."""

        def check(_: int) -> None:
            trainer.drop_gradients()
            self._require_movement(name, trainer.moved())

        return Contender(name, library, trainer.restart, trainer.step, check, meets=True)

    def on_root(self, name: str, library: str, trainer: Trainer) -> Contender:
        """Return a contender in which rank 0 trains and the others sleep."""
        is_root = self._ranks.rank == 0

        def check(calls: int) -> None:
            trainer.drop_gradients()
            moved = self._ranks.of_root(trainer.moved() if is_root else 0.0)
            self._require_movement(name, moved)
            if name == _WHOLE and self._exact:
                self._compare(name, calls, [moved])

        return Contender(
            name,
            library,
            trainer.restart if is_root else _rest,
            trainer.step if is_root else _rest,
            check,
        )

    def _compare(self, name: str, calls: int, moved: list[float]) -> None:
        first, expected = self._expected.setdefault(calls, (f"{name} on rank 0", moved[0]))
        for rank, value in enumerate(moved):
            if not isclose(value, expected, rel_tol=_AGREEMENT) or value <= 0:
                raise WrongResultError(
                    f"{name} on rank {rank}: {calls} steps moved the weights by {value:.9g}, but "
                    f"{first} by {expected:.9g}: they do not train the same model"
                )

    def _require_movement(self, name: str, moved: float) -> None:
        if not isfinite(moved) or moved <= 0:
            raise WrongResultError(f"{self._ranks.title} {name}: the weights moved by {moved}")


def _rest() -> None:
    pass
