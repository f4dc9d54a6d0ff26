"""The libraries that hvdtrain is compared with: how they start, stop, and sum a tensor."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mpi4py
import torch
import torch.distributed as dist
from mpi4py import MPI

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core import context
from hvdtrain.core.ordered import OrderedCommunicator
from hvdtrain.engines import open_world
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.engines.shared_memory.kernel import load_kernel
from hvdtrain.engines.torch_distributed.failures import Members
from hvdtrain.engines.torch_distributed.rendezvous import open_on_ranks
from hvdtrain.types import ReduceOp
from hvdtrain_bench.harness.ranks import Ranks

_BUILD = "python -m hvdtrain build-horovod"


@dataclass(frozen=True)
class Library:
    """A library with Horovod's interface, through one of its modules."""

    hvd: Any
    library: str  # its name and version
    # Starts and stops what must not run while others have their turn.
    turn: Callable[[], AbstractContextManager[None]] = nullcontext


@contextmanager
def _turn(module: Any) -> Iterator[None]:
    """Initialize Horovod, and shut it down again (collective); an error ends the job anyway.

    Its thread polls as long as it is initialized, so it is initialized for its turns only.
    """
    module.init()
    yield
    module.shutdown()


def find_horovod(
    ranks: Ranks, framework: str, ours: Any, skipped: dict[str, str]
) -> Library | None:
    """Return Horovod for a framework, or None and why it is skipped (collective)."""
    problem, module = "", None
    try:
        module = importlib.import_module(f"horovod.{framework}")
        if module is ours:
            problem = "hvdtrain itself answers its name here: take it from PYTHONPATH"
        elif not module.mpi_built():
            problem = f"Horovod was built without MPI: {_BUILD} --force"
    except (ImportError, OSError) as error:
        problem = f"{error}: {_BUILD}"
    problem = ranks.reason(problem)
    if problem:
        skipped["Horovod"] = problem
        return None
    cycle = os.environ.get("HOROVOD_CYCLE_TIME", "1")
    version = importlib.import_module("horovod").__version__
    return Library(module, f"Horovod {version} on MPI, cycle {cycle} ms", partial(_turn, module))


Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """A way to sum a float32 tensor over all ranks."""

    name: str
    library: str
    reduce: Reduce  # in place or not; returns the sum
    memory: torch.Tensor | None = None  # of the library, to sum in; None for any
    # Starts and stops what must not run while others have their turn.
    turn: Callable[[], AbstractContextManager[None]] = nullcontext


class PeerLibraries:
    """All libraries that can be compared here (collective; needs hvd.init())."""

    def __init__(self, ranks: Ranks) -> None:
        here = context.current()
        mpi = here.library.partition(" (")[0]
        self.skipped: dict[str, str] = {}
        self.horovod = find_horovod(ranks, "torch", hvd, self.skipped)
        self._shared = open_world("mpi", here.config, os.environ)
        self._plain = open_world("mpi", replace(here.config, shared_memory="0"), os.environ)
        self._numpy = open_world("mpi", replace(here.config, shared_memory="numpy"), os.environ)
        self._leave = _start_gloo(here.config)
        self.deepspeed = ""
        self.communicator = self._shared.communicator
        self.nodes = len(set(self._shared.nodes))  # groups of ranks that share memory
        self._version = f"hvdtrain {hvdtrain.__version__} on {mpi}"
        memory = "shared memory" if load_kernel() else "shared memory with numpy"
        alone = self.nodes == len(self._shared.nodes)
        self.library = f"{self._version} and {'no shared memory' if alone else memory}"
        self.mpi_library = f"mpi4py {mpi4py.__version__} on {mpi}"
        self.gloo_library = f"torch {torch.__version__}, gloo"

    def close(self) -> None:
        """Shut down all libraries but hvdtrain (collective)."""
        self._leave()
        for world in (self._shared, self._plain, self._numpy):
            world.communicator.close()

    def start_deepspeed(self, ranks: Ranks) -> None:
        """Compile and start DeepSpeed's all-reduce in shared memory, if it can be (collective)."""
        op: Any = None
        problem = version = ""
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            if self.nodes > 1:
                raise OSError("it knows ranks of one node only")
            version = importlib.import_module("deepspeed").__version__
            builders = importlib.import_module("deepspeed.ops.op_builder.cpu")
            op = builders.ShareMemCommBuilder().load(verbose=False)
        except (ImportError, OSError, RuntimeError) as error:
            problem = str(error).partition("\n")[0]
        if problem := ranks.reason(problem):
            self.skipped["DeepSpeed"] = problem
            return
        key = f"hvdtrain-{hvd.broadcast_object(os.getpid())}"
        # Its segments have the second and third in their names, and stay.
        os.environ |= {"LOCAL_SIZE": str(ranks.size), "MASTER_ADDR": key, "MASTER_PORT": "0"}
        op.initialize(ranks.size, ranks.rank)
        hvd.barrier()
        if ranks.rank == 0:
            for segment in Path("/dev/shm").glob(f"deepspeed_*_{key}_*"):
                segment.unlink()
        self.deepspeed = f"DeepSpeed {version}"

    def engine(self, name: str) -> Peer:
        """Return the engine mpi beneath hvdtrain.torch, for any memory."""
        return Peer(name, self.library, _engine_reduce(self._shared.communicator))

    def all_of_them(self, most_bytes: int) -> list[Peer]:
        """Return all contenders for sums of up to `most_bytes` (collective)."""
        memory = self._shared.communicator.empty(most_bytes)
        numpys = self._numpy.communicator.empty(most_bytes)
        own = [
            Peer("hvd.allreduce", self.library, lambda x: hvd.allreduce(x, name="x", op=hvd.Sum)),
            Peer("hvd.allreduce_", self.library, lambda x: hvd.allreduce_(x, name="x", op=hvd.Sum)),
            replace(
                self.engine("engine mpi, its memory"),
                memory=torch.as_tensor(memory).view(torch.float32),
            ),
            Peer(
                "engine mpi with numpy, its memory",
                f"{self._version} with numpy",
                _engine_reduce(self._numpy.communicator),
                memory=torch.as_tensor(numpys).view(torch.float32),
            ),
            Peer(
                "engine mpi, deterministic",
                self.library,
                _engine_reduce(OrderedCommunicator(self._shared.communicator)),
            ),
            Peer(
                "engine mpi, no shared memory",
                self._version,
                _engine_reduce(self._plain.communicator),
            ),
        ]
        if (horovod := self.horovod) is not None:
            its = horovod.hvd
            for name in ("allreduce", "allreduce_"):
                reduce = partial(getattr(its, name), name="x", op=its.Sum)
                own.append(Peer(f"Horovod {name}", horovod.library, reduce, turn=horovod.turn))
        return [
            *own,
            Peer("gloo all_reduce", self.gloo_library, _gloo_reduce),
            Peer("mpi4py Allreduce", self.mpi_library, _mpi_reduce),
        ]


def _start_gloo(config: Config) -> Callable[[], None]:
    """Create the default process group of torch.distributed; return what destroys it."""
    leaves = ExitStack()

    def start(found: Members, nodes: tuple[int, ...], _: tuple[str, ...]) -> EngineWorld:
        if len(set(nodes)) == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=found.store, rank=found.rank, world_size=found.size)
        leaves.callback(found.leave)  # at last
        leaves.callback(dist.destroy_process_group)
        return open_world("local", config, os.environ)  # torch's group is not an engine's

    open_on_ranks(config, os.environ, start, takes_newcomers=False)
    return leaves.close


def _engine_reduce(communicator: Communicator) -> Reduce:
    def reduce(tensor: torch.Tensor) -> torch.Tensor:
        communicator.allreduce(Buffer.from_array(tensor.numpy()), ReduceOp.SUM)
        return tensor

    return reduce


def _gloo_reduce(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _mpi_reduce(tensor: torch.Tensor) -> torch.Tensor:
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())
    return tensor
