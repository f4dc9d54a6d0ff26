"""Horovod itself, with DistributedSampler as in its examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError
from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Need, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer

_BUILD = "python -m hvdtrain build-horovod"
_CODE = """\
import horovod.torch as hvd
from torch.utils.data import DistributedSampler
hvd.init()
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), seed=seed)
loader = DataLoader(dataset, batch_size // hvd.size(), sampler=sampler)
test_sampler = DistributedSampler(test_dataset, hvd.size(), hvd.rank(), shuffle=False)
test_loader = DataLoader(test_dataset, 128, sampler=test_sampler)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
sampler.set_epoch(epoch)
test_sums = hvd.allreduce(test_sums, name="test", op=hvd.Sum)
"""


def _train(task: Task, place: Place) -> RankResult:
    import horovod.torch as hvd

    from hvdtrain_compare.torch.loop import train_torch

    if not hvd.mpi_built():
        raise UsageError(f"Horovod was built without MPI: {_BUILD} --force")
    hvd.init()
    return train_torch(task, place, _wrap)


def _wrap(problem: Problem) -> Trainer:
    import horovod
    import horovod.torch as hvd

    from hvdtrain_compare.torch.division import PaddedDivision
    from hvdtrain_compare.torch.trainer import Trainer

    own = problem.optimizer(problem.model)
    optimizer = hvd.DistributedOptimizer(own, problem.model.named_parameters())
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return Trainer(
        problem,
        optimizer=optimizer,
        division=PaddedDivision(problem.place, problem.batch),
        library=f"Horovod {horovod.__version__}",
    )


STRATEGY = Strategy(
    name="horovod",
    summary="Horovod itself",
    launch=Launch.MPI,
    needs=(
        TORCH,
        Need("horovod.torch", f"{_BUILD}, or --python horovod=PATH of an environment that has it"),
    ),
    code=_CODE,
    train=_train,
)
