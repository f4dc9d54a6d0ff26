"""torch's DataParallel: one process, whose GPUs, if there are any, get parts of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer

_CODE = """\
model = torch.nn.DataParallel(model)
"""


def _train(task: Task, place: Place) -> RankResult:
    from hvdtrain_compare.torch.loop import train_torch

    return train_torch(task, place, _wrap)


def _wrap(problem: Problem) -> Trainer:
    import torch

    from hvdtrain_compare.torch.trainer import Trainer

    model = torch.nn.DataParallel(problem.model)
    trainer = Trainer(problem, model=model)
    if not model.device_ids:
        trainer.notes.append("without GPUs DataParallel is the model alone, in one process")
    return trainer


STRATEGY = Strategy(
    name="dp",
    summary="torch's DataParallel, in one process",
    launch=Launch.ONE,
    needs=(TORCH,),
    code=_CODE,
    train=_train,
)
