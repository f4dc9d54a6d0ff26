"""One process with the whole batch: what the others are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer


def _train(task: Task, place: Place) -> RankResult:
    from hvdtrain_compare.torch.loop import train_torch

    return train_torch(task, place, _wrap)


def _wrap(problem: Problem) -> Trainer:
    from hvdtrain_compare.torch.trainer import Trainer

    return Trainer(problem)


STRATEGY = Strategy(
    name="one",
    summary="one process with the whole batch",
    launch=Launch.ONE,
    needs=(TORCH,),
    code="",
    train=_train,
)
