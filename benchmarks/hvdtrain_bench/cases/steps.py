"""Training steps with each library, and their overhead over a step without communication."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import hvdtrain.torch as hvd
from hvdtrain_bench.analysis.judge import (
    ALONE,
    DDP_COPIES,
    DEEPSPEED,
    FUSED,
    FUSED_LIMIT,
    HVDTRAIN,
    HVDTRAIN_AGAIN,
    NO_COMMUNICATION,
    REPLICATE,
    SHARDED,
    WHOLE,
)
from hvdtrain_bench.cases.checked import Agreement
from hvdtrain_bench.cases.models import (
    MODELS,
    BenchModel,
    Trainer,
    Wrap,
    bare_optimizer,
    first_weights,
)
from hvdtrain_bench.cases.peers import Library, PeerLibraries
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import OPTIMIZERS
from hvdtrain_bench.harness.turns import Bench, Contender

_COPIED_BYTES, _COPIES = 256 << 20, 9
_HAS_REPLICATE = find_spec("torch.distributed._composable.replicate_with_fsdp") is not None


def measure(bench: Bench, peers: PeerLibraries) -> None:
    peers.start_deepspeed(bench.ranks)
    bench.result.skipped.update(peers.skipped)
    if not _HAS_REPLICATE:
        bench.result.skipped[REPLICATE] = "this torch has none that is made of FSDP"
    settings = bench.settings
    rate = _memory_rate(bench.ranks)
    for key, factor, optimizer in product(settings.models, settings.batches, settings.optimizers):
        model = MODELS[key]
        samples = factor * model.batch
        suffix = "" if optimizer == OPTIMIZERS[0] else f", {optimizer}"
        name = f"{model.title}, {samples} samples per rank{suffix}"
        bench.say(name)
        contenders = _contenders(bench.ranks, peers, model, samples, optimizer, settings.only)
        seconds = bench.take_turns(contenders, fewest_calls=settings.steps_per_turn)
        del contenders
        gc.collect()  # models, their hooks and their process groups' buffers
        about: dict[str, Any] = {
            "model": key,
            "title": model.title,
            "samples": samples,
            "optimizer": optimizer,
            "gradient_bytes": sum(weight.nbytes for weight in first_weights(model)),
            "memory_bytes_per_second": rate,
        }
        bench.add(name, seconds, HVDTRAIN, HVDTRAIN_AGAIN, **about)


def _memory_rate(ranks: Ranks) -> float:
    """Return the bytes a second that each rank reads and writes while all of them copy."""
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        ranks.meet()
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return 2 * _COPIED_BYTES / ranks.largest(median(seconds))


def with_hvdtrain(
    module: nn.Module,
    kind: str = "sgd",
    fused: bool | None = None,
    sharded: bool = False,
    exchange: str | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Return the model and its optimizer for training with hvdtrain.torch (collective)."""
    own, named = bare_optimizer(module, kind, fused), module.named_parameters()
    return module, hvd.DistributedOptimizer(own, named, sharded=sharded, exchange=exchange)


def _with_horovod(horovod: Library, module: nn.Module, kind: str) -> tuple[nn.Module, Optimizer]:
    named = module.named_parameters()
    optimizer = bare_optimizer(module, kind)
    return module, horovod.hvd.DistributedOptimizer(optimizer, named_parameters=named)


def _with_ddp(module: nn.Module, kind: str, **option: Any) -> tuple[nn.Module, Optimizer]:
    # Its default also broadcasts the buffers of batch normalization, which the others do not.
    parallel = DistributedDataParallel(module, broadcast_buffers=False, **option)
    return parallel, bare_optimizer(module, kind)


def _with_deepspeed(module: nn.Module, kind: str) -> tuple[nn.Module, Optimizer]:
    """Return a model of DDP whose buckets DeepSpeed reduces in shared memory."""
    wrapped, optimizer = _with_ddp(module, kind, gradient_as_bucket_view=True)
    parallel: Any = wrapped

    def average(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(torch.ops.deepspeed.inference_all_reduce_(bucket.div_(hvd.size())))
        return done

    # DDP refuses annotations that are text.
    parallel.register_comm_hook(None, lambda _, bucket: average(bucket.buffer()))
    return parallel, optimizer


def _with_replicate(module: nn.Module, kind: str) -> tuple[nn.Module, Optimizer]:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=init_device_mesh("cpu", (hvd.size(),)))
    return module, bare_optimizer(module, kind)


def _contenders(
    ranks: Ranks, peers: PeerLibraries, model: BenchModel, samples: int, kind: str, only: str
) -> list[Contender]:
    weights = first_weights(model)
    batches = [model.make_batch(samples, seed=rank) for rank in range(ranks.size)]
    own = batches[ranks.rank]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    del batches
    judge = Agreement(ranks, model.exact)

    def trainer(wrap: Wrap) -> Trainer:
        return Trainer(model, weights, own, wrap, seed=ranks.rank)

    def bare(module: nn.Module, fused: bool | None = None) -> tuple[nn.Module, Optimizer]:
        return module, bare_optimizer(module, kind, fused)

    torch_library = f"torch {torch.__version__}"

    @cache
    def alone() -> Trainer:
        return trainer(bare)

    def whole() -> Trainer:
        return Trainer(model, weights, (inputs, targets), bare, seed=0)

    makers: dict[str, Callable[[], Contender]] = {
        WHOLE: lambda: judge.on_root(WHOLE, torch_library, whole()),
        ALONE: lambda: judge.on_root(ALONE, torch_library, alone()),
        NO_COMMUNICATION: lambda: judge.without_communication(
            NO_COMMUNICATION, torch_library, alone()
        ),
    }

    def together(
        name: str,
        library: str,
        wrap: Callable[..., tuple[nn.Module, Optimizer]],
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        makers[name] = lambda: judge.together(
            name, library, trainer(partial(wrap, kind=kind)), turn
        )

    together(HVDTRAIN, peers.library, with_hvdtrain)
    together(HVDTRAIN_AGAIN, peers.library, with_hvdtrain)
    makers[FUSED_LIMIT] = lambda: judge.without_communication(
        FUSED_LIMIT, torch_library, trainer(partial(bare, fused=True))
    )
    together(FUSED, peers.library, partial(with_hvdtrain, fused=True))
    together(SHARDED, peers.library, partial(with_hvdtrain, sharded=True))
    known = signature(DistributedDataParallel).parameters  # the second one since torch 2.13
    for name, option in {"DDP": "gradient_as_bucket_view", DDP_COPIES: "batched_grad_copy"}.items():
        if option in known:
            options: dict[str, Any] = {option: True}
            together(name, peers.gloo_library, partial(_with_ddp, **options))
    if peers.deepspeed:
        together(DEEPSPEED, f"torch {torch.__version__}, {peers.deepspeed}", _with_deepspeed)
    if _HAS_REPLICATE:
        together(REPLICATE, peers.gloo_library, _with_replicate)
    if (horovod := peers.horovod) is not None:
        together("Horovod", horovod.library, partial(_with_horovod, horovod), horovod.turn)
    return [make() for name, make in makers.items() if only in ("", name)]
