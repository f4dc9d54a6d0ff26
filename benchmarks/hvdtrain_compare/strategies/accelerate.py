"""Hugging Face's Accelerate: DDP on gloo, with its own division of the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Need, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer

_CODE = """\
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = DataLoader(dataset, batch_size // accelerator.num_processes, shuffle=True)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
accelerator.backward(loss)
outputs, targets = accelerator.gather_for_metrics((outputs, targets))
"""


def _train(task: Task, place: Place) -> RankResult:
    import torch

    from hvdtrain_compare.torch.loop import train_torch

    result = train_torch(task, place, _wrap)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return result


def _wrap(problem: Problem) -> Trainer:
    from hvdtrain_compare.torch.accelerated_trainer import AcceleratedTrainer

    return AcceleratedTrainer(problem)


STRATEGY = Strategy(
    name="accelerate",
    summary="Accelerate, with DDP on gloo",
    launch=Launch.PROCESSES,
    needs=(
        TORCH,
        Need("accelerate", "pip install accelerate"),
    ),
    code=_CODE,
    train=_train,
)
