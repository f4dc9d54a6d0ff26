"""torch's post-local SGD: gradients averaged at first, then weights every few steps, on gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer

_WARM_UP_STEPS, _PERIOD_STEPS = 10, 4
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"
_CODE = f"""\
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from {_HOOKS} import PostLocalSGDState, post_localSGD_hook
torch.distributed.init_process_group("gloo")
sampler = DistributedSampler(dataset, seed=seed)
loader = DataLoader(dataset, batch_size // torch.distributed.get_world_size(), sampler=sampler)
test_sampler = DistributedSampler(test_dataset, shuffle=False)
test_loader = DataLoader(test_dataset, 128, sampler=test_sampler)
model = DistributedDataParallel(model)
alone, _ = torch.distributed.new_subgroups(group_size=1)
state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter={_WARM_UP_STEPS})
model.register_comm_hook(state, post_localSGD_hook)
averager = PeriodicModelAverager(period={_PERIOD_STEPS}, warmup_steps={_WARM_UP_STEPS})
optimizer = PostLocalSGDOptimizer(optimizer, averager)
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
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from hvdtrain_compare.torch.division import PaddedDivision
    from hvdtrain_compare.torch.trainer import Trainer

    model = DistributedDataParallel(problem.model)
    # By default a subgroup has all ranks of a host, which would then never train on their own.
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=_WARM_UP_STEPS)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=_PERIOD_STEPS, warmup_steps=_WARM_UP_STEPS)
    trainer = Trainer(
        problem,
        model=model,
        optimizer=PostLocalSGDOptimizer(problem.optimizer(model), averager),
        division=PaddedDivision(problem.place, problem.batch),
        library=f"torch {torch.__version__}, gloo",
    )
    trainer.notes.append(
        f"gradients are averaged for {_WARM_UP_STEPS} steps, then weights every {_PERIOD_STEPS}"
    )
    return trainer


STRATEGY = Strategy(
    name="torch-postlocal",
    summary="torch's post-local SGD on DDP and gloo",
    launch=Launch.PROCESSES,
    needs=(TORCH,),
    code=_CODE,
    train=_train,
)
