"""torch's FSDP2: parameters, gradients and optimizer state in shards, with gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer

_CODE = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
torch.distributed.init_process_group("gloo")
sampler = DistributedSampler(dataset, seed=seed)
loader = DataLoader(dataset, batch_size // torch.distributed.get_world_size(), sampler=sampler)
test_sampler = DistributedSampler(test_dataset, shuffle=False)
test_loader = DataLoader(test_dataset, 128, sampler=test_sampler)
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
fully_shard(model, mesh=mesh)
sampler.set_epoch(epoch)
torch.distributed.all_reduce(test_sums)
"""


def _train(task: Task, place: Place) -> RankResult:
    from hvdtrain_compare.torch.gloo import with_gloo
    from hvdtrain_compare.torch.loop import train_torch

    with with_gloo():
        return train_torch(task, place, _wrap)


def _wrap(problem: Problem) -> Trainer:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hvdtrain_compare.torch.division import PaddedDivision
    from hvdtrain_compare.torch.sharded_trainer import ShardedTrainer

    fully_shard(problem.model, mesh=init_device_mesh("cpu", (problem.place.size,)))
    optimizer = problem.optimizer(problem.model)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["fused"] = False
    trainer = ShardedTrainer(
        problem,
        optimizer=optimizer,
        division=PaddedDivision(problem.place, problem.batch),
        library=f"torch {torch.__version__}, gloo",
    )
    if fused:  # torch 2.13: "aten._fused_sgd_.default does not have a sharding strategy"
        trainer.notes.append("torch's fused optimizer takes no shards: it is replaced by the usual")
    return trainer


STRATEGY = Strategy(
    name="fsdp2",
    summary="torch's fully_shard on gloo",
    launch=Launch.PROCESSES,
    needs=(TORCH,),
    code=_CODE,
    train=_train,
)
