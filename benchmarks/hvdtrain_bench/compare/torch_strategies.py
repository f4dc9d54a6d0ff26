"""The strategies for torch: the code that a user adds for each, and how it wraps a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError
from hvdtrain_bench.compare.protocol import TORCH, Launch, Need, Place, RankResult, Strategy, Task

if TYPE_CHECKING:
    from hvdtrain_bench.compare.torch_training import Problem, Trainer


def _trains(
    wrap: Callable[[Problem], Trainer],
    session: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[Task, Place], RankResult]:
    """Return how a strategy trains, within a session of its library."""

    def train(task: Task, place: Place) -> RankResult:
        from hvdtrain_bench.compare.torch_training import train_torch

        with session():
            return train_torch(task, place, wrap)

    return train


def _one(problem: Problem) -> Trainer:
    from hvdtrain_bench.compare.torch_training import Trainer

    return Trainer(problem)


_HVDTRAIN = """\
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


@contextmanager
def _with_hvdtrain() -> Iterator[None]:
    import hvdtrain.torch as hvd

    hvd.init()
    yield


def _hvdtrain(problem: Problem) -> Trainer:
    import hvdtrain.torch as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context
    from hvdtrain_bench.compare.torch_training import ExactTrainer

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


_BUILD_HOROVOD = "python -m hvdtrain build-horovod"
_HOROVOD = """\
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


@contextmanager
def _with_horovod() -> Iterator[None]:
    import horovod.torch as hvd

    if not hvd.mpi_built():
        raise UsageError(f"Horovod was built without MPI: {_BUILD_HOROVOD} --force")
    hvd.init()
    yield


def _horovod(problem: Problem) -> Trainer:
    import horovod
    import horovod.torch as hvd

    from hvdtrain_bench.compare.torch_training import padded_trainer

    own = problem.optimizer(problem.model)
    optimizer = hvd.DistributedOptimizer(own, problem.model.named_parameters())
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return padded_trainer(problem, optimizer=optimizer, library=f"Horovod {horovod.__version__}")


_SAMPLERS = """\
torch.distributed.init_process_group("gloo")
sampler = DistributedSampler(dataset, seed=seed)
loader = DataLoader(dataset, batch_size // torch.distributed.get_world_size(), sampler=sampler)
test_sampler = DistributedSampler(test_dataset, shuffle=False)
"""
_LAST = """\
sampler.set_epoch(epoch)
torch.distributed.all_reduce(test_sums)
"""


@contextmanager
def _with_gloo() -> Iterator[None]:
    """Make the default process group from the variables of this process; destroy it at the end."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


_DDP = f"""\
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
{_SAMPLERS}\
test_loader = DataLoader(test_dataset, batch_size, sampler=test_sampler)
model = DistributedDataParallel(model)
{_LAST}"""


def _ddp(problem: Problem) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    from hvdtrain_bench.compare.torch_training import padded_trainer

    return padded_trainer(problem, model=DistributedDataParallel(problem.model))


_FSDP2 = f"""\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
{_SAMPLERS}\
test_loader = DataLoader(test_dataset, 128, sampler=test_sampler)
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
fully_shard(model, mesh=mesh)
{_LAST}"""


def _fsdp2(problem: Problem) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hvdtrain_bench.compare.torch_training import padded_trainer

    fully_shard(problem.model, mesh=init_device_mesh("cpu", (problem.place.size,)))
    optimizer = problem.optimizer(problem.model)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["fused"] = False
    trainer = padded_trainer(problem, optimizer=optimizer)
    if fused:  # torch 2.13: "aten._fused_sgd_.default does not have a sharding strategy"
        trainer.notes.append("torch's fused optimizer takes no shards: it is replaced by the usual")
    return trainer


_WARM_UP_STEPS, _PERIOD_STEPS = 10, 4
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"
_POSTLOCAL = f"""\
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from {_HOOKS} import PostLocalSGDState, post_localSGD_hook
{_SAMPLERS}\
test_loader = DataLoader(test_dataset, 128, sampler=test_sampler)
model = DistributedDataParallel(model)
alone, _ = torch.distributed.new_subgroups(group_size=1)
state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter={_WARM_UP_STEPS})
model.register_comm_hook(state, post_localSGD_hook)
averager = PeriodicModelAverager(period={_PERIOD_STEPS}, warmup_steps={_WARM_UP_STEPS})
optimizer = PostLocalSGDOptimizer(optimizer, averager)
{_LAST}"""


def _postlocal(problem: Problem) -> Trainer:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from hvdtrain_bench.compare.torch_training import padded_trainer

    model = DistributedDataParallel(problem.model)
    # By default a subgroup has all ranks of a host, which would then never train on their own.
    alone, _ = torch.distributed.new_subgroups(group_size=1)
    state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=_WARM_UP_STEPS)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=_PERIOD_STEPS, warmup_steps=_WARM_UP_STEPS)
    optimizer = PostLocalSGDOptimizer(problem.optimizer(model), averager)
    trainer = padded_trainer(problem, model=model, optimizer=optimizer)
    trainer.notes.append(
        f"gradients are averaged for {_WARM_UP_STEPS} steps, then weights every {_PERIOD_STEPS}"
    )
    return trainer


def _dp(problem: Problem) -> Trainer:
    import torch

    from hvdtrain_bench.compare.torch_training import Trainer

    model = torch.nn.DataParallel(problem.model)
    trainer = Trainer(problem, model=model)
    if not model.device_ids:
        trainer.notes.append("without GPUs DataParallel is the model alone, in one process")
    return trainer


_ACCELERATE = """\
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = DataLoader(dataset, batch_size // accelerator.num_processes, shuffle=True)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
accelerator.backward(loss)
outputs, targets = accelerator.gather_for_metrics((outputs, targets))
"""


@contextmanager
def _with_accelerate() -> Iterator[None]:
    import torch

    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _accelerate(problem: Problem) -> Trainer:
    from hvdtrain_bench.compare.accelerated_training import AcceleratedTrainer

    return AcceleratedTrainer(problem)


REFERENCE = Strategy(
    "one", "one process with the whole batch", Launch.ONE, (TORCH,), "", _trains(_one)
)
STRATEGIES = (
    Strategy(
        "hvdtrain",
        "hvdtrain.torch; with :sharded or an exchange, such as :half:type=bf16",
        Launch.MPI,
        (TORCH,),
        _HVDTRAIN,
        _trains(_hvdtrain, _with_hvdtrain),
        takes_variants=True,
    ),
    Strategy(
        "horovod",
        "Horovod itself",
        Launch.MPI,
        (
            TORCH,
            Need(
                "horovod.torch",
                f"{_BUILD_HOROVOD}, or --python horovod=PATH of an environment that has it",
            ),
        ),
        _HOROVOD,
        _trains(_horovod, _with_horovod),
    ),
    Strategy(
        "ddp",
        "torch's DistributedDataParallel on gloo",
        Launch.PROCESSES,
        (TORCH,),
        _DDP,
        _trains(_ddp, _with_gloo),
    ),
    Strategy(
        "fsdp2",
        "torch's fully_shard on gloo",
        Launch.PROCESSES,
        (TORCH,),
        _FSDP2,
        _trains(_fsdp2, _with_gloo),
    ),
    Strategy(
        "dp",
        "torch's DataParallel, in one process",
        Launch.ONE,
        (TORCH,),
        "model = torch.nn.DataParallel(model)\n",
        _trains(_dp),
    ),
    Strategy(
        "accelerate",
        "Accelerate, with DDP on gloo",
        Launch.PROCESSES,
        (TORCH, Need("accelerate", "pip install accelerate")),
        _ACCELERATE,
        _trains(_accelerate, _with_accelerate),
    ),
    Strategy(
        "torch-postlocal",
        "torch's post-local SGD on DDP and gloo",
        Launch.PROCESSES,
        (TORCH,),
        _POSTLOCAL,
        _trains(_postlocal, _with_gloo),
    ),
)
