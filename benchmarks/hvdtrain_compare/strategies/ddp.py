"""torch's DistributedDataParallel, with gloo and DistributedSampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer

_CODE = """\
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
torch.distributed.init_process_group("gloo")
sampler = DistributedSampler(dataset, seed=seed)
loader = DataLoader(dataset, batch_size // torch.distributed.get_world_size(), sampler=sampler)
test_sampler = DistributedSampler(test_dataset, shuffle=False)
test_loader = DataLoader(test_dataset, batch_size, sampler=test_sampler)
model = DistributedDataParallel(model)
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
    from torch.nn.parallel import DistributedDataParallel

    from hvdtrain_compare.torch.division import PaddedDivision
    from hvdtrain_compare.torch.trainer import Trainer

    return Trainer(
        problem,
        model=DistributedDataParallel(problem.model),
        division=PaddedDivision(problem.place, problem.batch),
        library=f"torch {torch.__version__}, gloo",
    )


STRATEGY = Strategy(
    name="ddp",
    summary="torch's DistributedDataParallel on gloo",
    launch=Launch.PROCESSES,
    needs=(TORCH,),
    code=_CODE,
    train=_train,
)
