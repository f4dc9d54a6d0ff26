"""hvdtrain: gradients all-reduced in shared memory, with each sample used exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain_compare.protocol.rank_file import RankResult
from hvdtrain_compare.protocol.strategy import TORCH, Launch, Strategy
from hvdtrain_compare.protocol.task import Place, Task

if TYPE_CHECKING:
    from hvdtrain_compare.torch.problem import Problem
    from hvdtrain_compare.torch.trainer import Trainer

_SHARDED = "sharded"
_CODE = """\
import hvdtrain.torch as hvd
from hvdtrain.data.sampling import EvaluationSampler, GlobalBatchSampler
hvd.init()
sampler = GlobalBatchSampler(len(dataset), batch_size, seed)
loader = DataLoader(dataset, batch_sampler=sampler)
test_loader = DataLoader(test_dataset, 128, sampler=EvaluationSampler(len(test_dataset)))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler.set_epoch(epoch)
batches = zip(loader, sampler.counts)
optimizer.sample_weight = count
test_sums = hvd.allreduce(test_sums, name="test", op=hvd.Sum)
"""


def _train(task: Task, place: Place) -> RankResult:
    import hvdtrain.torch as hvd
    from hvdtrain_compare.torch.loop import train_torch

    hvd.init()
    return train_torch(task, place, _wrap)


def _wrap(problem: Problem) -> Trainer:
    import hvdtrain.torch as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context
    from hvdtrain_compare.torch.exact_trainer import ExactTrainer

    sharded = problem.variant == _SHARDED
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        problem.optimizer(problem.model),
        problem.model.named_parameters(),
        exchange=None if sharded else problem.variant or None,
        sharded=sharded,
    )
    mpi = context.current().library.partition(" (")[0]
    return ExactTrainer(problem, optimizer=optimizer, library=f"hvdtrain {__version__} on {mpi}")


STRATEGY = Strategy(
    name="hvdtrain",
    summary="hvdtrain.torch; with :sharded or an exchange, such as :half:type=bf16",
    launch=Launch.MPI,
    needs=(TORCH,),
    code=_CODE,
    train=_train,
    takes_variants=True,
)
