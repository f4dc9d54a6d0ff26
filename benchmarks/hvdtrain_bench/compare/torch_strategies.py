"""How each strategy for torch starts its library and wraps a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

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


def _hvdtrain(problem: TorchProblem) -> TorchTrainer:
    import hvdtrain.torch as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context

    hvd.init()
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


def _horovod(problem: TorchProblem) -> TorchTrainer:
    import horovod
    import horovod.torch as hvd

    if not hvd.mpi_built():
        raise UsageError("Horovod was built without MPI: python -m hvdtrain build-horovod --force")
    hvd.init()
    own = problem.optimizer(problem.model)
    optimizer = hvd.DistributedOptimizer(own, problem.model.named_parameters())
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return padded_trainer(problem, optimizer=optimizer, library=f"Horovod {horovod.__version__}")


def _ddp(problem: TorchProblem) -> TorchTrainer:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    return padded_trainer(problem, model=DistributedDataParallel(problem.model))


def _fsdp2(problem: TorchProblem) -> TorchTrainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
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

    dist.init_process_group("gloo")
    model = DistributedDataParallel(problem.model)
    # By default a subgroup has all ranks of a host, which would then never train on their own.
    alone, _ = dist.new_subgroups(group_size=1)
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


def _accelerate(problem: TorchProblem) -> TorchTrainer:
    from hvdtrain_bench.compare.accelerated_training import AcceleratedTrainer

    return AcceleratedTrainer(problem)


_WAYS: Mapping[str, Callable[[TorchProblem], TorchTrainer]] = {
    "one": TorchTrainer,
    "hvdtrain": _hvdtrain,
    "horovod": _horovod,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "dp": _dp,
    "accelerate": _accelerate,
    "torch-postlocal": _postlocal,
}


def train(task: ContenderTask, place: ProcessPlace) -> RankResult:
    """Train as a strategy does, and destroy the process group that it has made, if any."""
    result = train_torch(task, place, _WAYS[task.strategy])
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
