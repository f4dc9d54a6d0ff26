"""The strategies of `compare`, those that --with names, and the code that a user adds for each."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hvdtrain.errors import UsageError, did_you_mean


class Launch(Enum):
    MPI = "mpirun"
    PROCESSES = "processes with RANK, WORLD_SIZE and MASTER_ADDR, as torchrun starts them"
    ONE = "one process"


@dataclass(frozen=True)
class Need:
    module: str
    install: str

    def require(self) -> None:
        """Check that the module is installed, without importing it."""
        try:
            found = importlib.util.find_spec(self.module)
        except ModuleNotFoundError:  # of the package that it is part of
            found = None
        if found is None:
            package = self.module.partition(".")[0]
            raise UsageError(f"{package} is not installed: {self.install}")


TORCH = Need("torch", "pip install 'hvdtrain[torch]'")
KERAS = Need("keras", "pip install 'hvdtrain[keras]'")
TENSORFLOW = Need("tensorflow", "pip install 'hvdtrain[tensorflow]'")
JAX = Need("jax", "pip install jax")


@dataclass(frozen=True)
class Strategy:
    name: str
    summary: str
    code: str = ""
    launch: Launch = Launch.PROCESSES
    needs: tuple[Need, ...] = ()
    takes_variants: bool = False
    backend: str = ""

    @property
    def lines(self) -> int:
        """The number of lines that a user adds or changes; blank lines and comments are none."""
        lines = (line.strip() for line in self.code.splitlines())
        return sum(1 for line in lines if line and not line.startswith("#"))

    def processes(self, ranks: int) -> int:
        return 1 if self.launch is Launch.ONE else ranks


_HVDTRAIN_TORCH = """\
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
_BUILD_HOROVOD = "python -m hvdtrain build-horovod"
_HOROVOD_TORCH = """\
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
_DDP = f"""\
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
{_SAMPLERS}\
test_loader = DataLoader(test_dataset, batch_size, sampler=test_sampler)
model = DistributedDataParallel(model)
{_LAST}"""
_FSDP2 = f"""\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
{_SAMPLERS}\
test_loader = DataLoader(test_dataset, 128, sampler=test_sampler)
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
fully_shard(model, mesh=mesh)
{_LAST}"""
WARM_UP_STEPS, PERIOD_STEPS = 10, 4
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
state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter={WARM_UP_STEPS})
model.register_comm_hook(state, post_localSGD_hook)
averager = PeriodicModelAverager(period={PERIOD_STEPS}, warmup_steps={WARM_UP_STEPS})
optimizer = PostLocalSGDOptimizer(optimizer, averager)
{_LAST}"""
_ACCELERATE = """\
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = DataLoader(dataset, batch_size // accelerator.num_processes, shuffle=True)
model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, test_loader)
accelerator.backward(loss)
outputs, targets = accelerator.gather_for_metrics((outputs, targets))
"""
_HVDTRAIN_KERAS = """\
import hvdtrain.keras as hvd
hvd.init()
weights = hvd.size() * counted / batch_size
optimizer = hvd.DistributedOptimizer(optimizer)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
"""
_HOROVOD_KERAS = """\
import horovod.keras as hvd
hvd.init()
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(batch_size // hvd.size())
steps = len(images) // batch_size
optimizer = hvd.DistributedOptimizer(optimizer)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
"""
_MIRRORED = """\
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = make_model()
    model.compile(optimizer, loss)
"""
_HOROVOD = Need(
    "horovod", f"{_BUILD_HOROVOD}, or --python horovod=PATH of an environment with Horovod"
)
_ONE = "one process with the whole batch"
REFERENCES = {
    "torch": Strategy("one", _ONE, launch=Launch.ONE, needs=(TORCH,)),
    "keras": Strategy("one", _ONE, launch=Launch.ONE, needs=(KERAS,)),
}
_OF_TORCH = (
    Strategy(
        "hvdtrain",
        "hvdtrain.torch; with :sharded or an exchange, such as :half:type=bf16",
        _HVDTRAIN_TORCH,
        Launch.MPI,
        (TORCH,),
        takes_variants=True,
    ),
    Strategy("horovod", "Horovod itself", _HOROVOD_TORCH, Launch.MPI, (TORCH, _HOROVOD)),
    Strategy("ddp", "torch's DistributedDataParallel on gloo", _DDP, needs=(TORCH,)),
    Strategy("fsdp2", "torch's fully_shard on gloo", _FSDP2, needs=(TORCH,)),
    Strategy(
        "dp",
        "torch's DataParallel, in one process",
        "model = torch.nn.DataParallel(model)\n",
        Launch.ONE,
        (TORCH,),
    ),
    Strategy(
        "accelerate",
        "Accelerate, with DDP on gloo",
        _ACCELERATE,
        needs=(TORCH, Need("accelerate", "pip install accelerate")),
    ),
    Strategy(
        "torch-postlocal", "torch's post-local SGD on DDP and gloo", _POSTLOCAL, needs=(TORCH,)
    ),
)
_OF_KERAS = (
    Strategy(
        "hvdtrain",
        "hvdtrain.keras; with :sharded or an exchange, such as :half:type=bf16",
        _HVDTRAIN_KERAS,
        Launch.MPI,
        (KERAS,),
        takes_variants=True,
    ),
    Strategy("horovod", "Horovod itself", _HOROVOD_KERAS, Launch.MPI, (KERAS, _HOROVOD)),
    Strategy(
        "mirrored",
        "tf.distribute.MirroredStrategy, in one process",
        _MIRRORED,
        Launch.ONE,
        (KERAS, TENSORFLOW),
        backend="tensorflow",
    ),
    Strategy(
        "jax-distribution",
        "keras.distribution.DataParallel on JAX, in one process",
        "keras.distribution.set_distribution(keras.distribution.DataParallel())\n",
        Launch.ONE,
        (KERAS, JAX),
        backend="jax",
    ),
)
STRATEGIES: Mapping[str, Mapping[str, Strategy]] = {
    "torch": {strategy.name: strategy for strategy in _OF_TORCH},
    "keras": {strategy.name: strategy for strategy in _OF_KERAS},
}


def find_strategy(framework: str, name: str) -> Strategy:
    reference = REFERENCES[framework]
    return reference if name == reference.name else STRATEGIES[framework][name]


@dataclass(frozen=True)
class StrategyContender:
    """A strategy that takes part, under a name of its own."""

    label: str
    title: str
    strategy: Strategy
    variant: str = ""
    python: str | None = None


def reference(framework: str) -> StrategyContender:
    """Return the contender that the weights of the others are compared with."""
    return StrategyContender("one process", "one process", REFERENCES[framework])


def parse_contenders(
    texts: Sequence[str], pythons: Mapping[str, str], framework: str
) -> list[StrategyContender]:
    """Return the contenders in the order in which they are named."""
    known = STRATEGIES[framework]
    titles = [title for text in texts for title in _names(text, known)]
    seen: Counter[str] = Counter()
    found = []
    for title in titles:
        seen[title] += 1
        label = title if seen[title] == 1 else f"{title} ({seen[title]})"
        name, _, variant = title.partition(":")
        strategy = _strategy(name, known, framework)
        if variant and not strategy.takes_variants:
            raise UsageError(f"--with {title}: {name} has no variants: leave out ':{variant}'")
        found.append(StrategyContender(label, title, strategy, variant, pythons.get(name)))
    for name in pythons:
        if all(contender.strategy.name != name for contender in found):
            raise UsageError(f"--python {name}={pythons[name]}: --with does not name {name}")
    return found


def _names(text: str, known: Mapping[str, Strategy]) -> list[str]:
    """Split at commas, but for those between the options of an exchange, which have an =."""
    names: list[str] = []
    for part in text.split(","):
        word = part.strip()
        if names and "=" in word and word.partition(":")[0] not in known:
            names[-1] += f",{word}"
        else:
            names.append(word)
    return names


def _strategy(name: str, known: Mapping[str, Strategy], framework: str) -> Strategy:
    if name in known:
        return known[name]
    near = did_you_mean(name, list(known))
    raise UsageError(
        f"--with {name!r}: no such strategy{near or ':'} with --framework {framework} choose from "
        f"{', '.join(known)}"
    )
