"""How each strategy for torch wraps a problem, within a session of its library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from hvdtrain.errors import UsageError
from hvdtrain_bench.compare.protocol import ContenderTask, ProcessPlace, RankResult
from hvdtrain_bench.compare.strategies import PERIOD_STEPS, WARM_UP_STEPS
from hvdtrain_bench.compare.torch_training import (
    ExactTrainer,
    TorchProblem,
    TorchTrainer,
    padded_trainer,
    train_torch,
)


@contextmanager
def _with_hvdtrain() -> Iterator[None]:
    import hvdtrain.torch as hvd

    hvd.init()
    yield


def _hvdtrain(problem: TorchProblem) -> TorchTrainer:
    import hvdtrain.torch as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context

    sharded = problem.variant == "sharded"
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        problem.optimizer(problem.model),
        problem.model.named_parameters(),
        exchange=None if sharded else problem.variant or None,
        sharded=sharded,
    )
    mpi = context.current().library.partition(" (")[0]
    return ExactTrainer(problem, optimizer=optimizer, library=f"hvdtrain {__version__} on {mpi}")


@contextmanager
def _with_horovod() -> Iterator[None]:
    import horovod.torch as hvd

    if not hvd.mpi_built():
        raise UsageError("Horovod was built without MPI: python -m hvdtrain build-horovod --force")
    hvd.init()
    yield


def _horovod(problem: TorchProblem) -> TorchTrainer:
    import horovod
    import horovod.torch as hvd

    own = problem.optimizer(problem.model)
    optimizer = hvd.DistributedOptimizer(own, problem.model.named_parameters())
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return padded_trainer(problem, optimizer=optimizer, library=f"Horovod {horovod.__version__}")


@contextmanager
def _with_gloo() -> Iterator[None]:
    """Make the default process group from the variables of this process; destroy it at the end."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def _ddp(problem: TorchProblem) -> TorchTrainer:
    from torch.nn.parallel import DistributedDataParallel

    return padded_trainer(problem, model=DistributedDataParallel(problem.model))


def _fsdp2(problem: TorchProblem) -> TorchTrainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(problem.model, mesh=init_device_mesh("cpu", (problem.place.size,)))
    optimizer = problem.optimizer(problem.model)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["fused"] = False
    trainer = padded_trainer(problem, optimizer=optimizer)
    if fused:  # torch 2.13: "aten._fused_sgd_.default does not have a sharding strategy"
        trainer.notes.append("torch's fused optimizer takes no shards: it is replaced by the usual")
    return trainer


def _postlocal(problem: TorchProblem) -> TorchTrainer:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(problem.model)
    # By default a subgroup has all ranks of a host, which would then never train on their own.
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=WARM_UP_STEPS)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD_STEPS, warmup_steps=WARM_UP_STEPS)
    optimizer = PostLocalSGDOptimizer(problem.optimizer(model), averager)
    trainer = padded_trainer(problem, model=model, optimizer=optimizer)
    trainer.notes.append(
        f"gradients are averaged for {WARM_UP_STEPS} steps, then weights every {PERIOD_STEPS}"
    )
    return trainer


def _dp(problem: TorchProblem) -> TorchTrainer:
    model = torch.nn.DataParallel(problem.model)
    trainer = TorchTrainer(problem, model=model)
    if not model.device_ids:
        trainer.notes.append("without GPUs DataParallel is the model alone, in one process")
    return trainer


@contextmanager
def _with_accelerate() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _accelerate(problem: TorchProblem) -> TorchTrainer:
    from hvdtrain_bench.compare.accelerated_training import AcceleratedTrainer

    return AcceleratedTrainer(problem)


_Session = Callable[[], AbstractContextManager[None]]
_WAYS: Mapping[str, tuple[Callable[[TorchProblem], TorchTrainer], _Session]] = {
    "one": (TorchTrainer, nullcontext),
    "hvdtrain": (_hvdtrain, _with_hvdtrain),
    "horovod": (_horovod, _with_horovod),
    "ddp": (_ddp, _with_gloo),
    "fsdp2": (_fsdp2, _with_gloo),
    "dp": (_dp, nullcontext),
    "accelerate": (_accelerate, _with_accelerate),
    "torch-postlocal": (_postlocal, _with_gloo),
}


def train(task: ContenderTask, place: ProcessPlace) -> RankResult:
    """Train as a strategy does, within a session of its library."""
    wrap, session = _WAYS[task.strategy]
    with session():
        return train_torch(task, place, wrap)
