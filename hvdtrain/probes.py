"""Programs that test one part of an installation each, in a process that may crash or hang.

`check` and `build-horovod` start them as `python -m hvdtrain.probes NAME ARGUMENTS`. Each ends with
an error, or prints one JSON object (on rank 0; `horovod` prints none). Nothing imports them.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.errors import EXIT_CRASH, HvdtrainError
from hvdtrain.topology import interface_address

_COUNT = 1000
_MESSAGES = 20


def engine(name: str) -> None:
    """Open an engine on one rank: whether it is available, and its library or why it is not."""
    from hvdtrain.engines import open_world

    try:
        world = open_world(name, Config(), os.environ)
    except HvdtrainError as error:
        _answer(available=False, reason=str(error))
    else:
        _answer(available=True, library=world.library)
        world.communicator.close()


def framework(name: str) -> None:
    """Import torch, tensorflow or jax: its version and the number of GPUs that it finds."""
    library: Any = importlib.import_module(name)
    if name == "torch":
        gpus = library.cuda.device_count() if library.cuda.is_available() else 0
    elif name == "tensorflow":
        gpus = len(library.config.list_physical_devices("GPU"))
    else:
        gpus = sum(device.platform == "gpu" for device in library.devices())
    _answer(version=str(library.__version__), gpus=gpus)


def kernel() -> None:
    """Load the kernel with which ranks of a node add: why it is not used, or ""."""
    from hvdtrain.engines.shared_memory.kernel import why_no_kernel

    _answer(objection=why_no_kernel())


def allocator(framework: str) -> None:
    """Compile and try the allocator of gradients: why they are copied into buckets, or ""."""
    if framework == "torch":
        from hvdtrain.torch.allocator import why_no_allocator
    else:
        from hvdtrain.tensorflow.allocator import why_no_allocator
    _answer(objection=why_no_allocator())


def torch_steps() -> None:
    """Compare steps of torch's optimizers with the kernel's: why it is not used, or ""."""
    from hvdtrain.torch.kernel_step import STATES, find_form

    others = [kind.__name__ for kind in STATES if find_form(kind, fused=False) is None]
    objection = f"other bits than this torch's for {', '.join(others)}" if others else ""
    if not Config.from_environ(os.environ).torch_steps:
        objection = "HVDTRAIN_TORCH_STEPS=0"
    _answer(objection=objection)


def nccl() -> None:
    """All-reduce on one GPU, for what NCCL says of itself with NCCL_DEBUG=INFO."""
    import torch

    torch.cuda.nccl.all_reduce([torch.ones(1, device="cuda")])
    _answer()


def mpi_start() -> None:
    """Initialize MPI on one rank: its threads and GPU memory, and what mpi4py is built for."""
    import ctypes

    from mpi4py import MPI

    from hvdtrain.engines.mpi.flat import gpu_kinds

    gpu_memory = gpu_kinds(ctypes.CDLL(MPI.__file__))
    _answer(
        threads=_thread_level(MPI),
        gpu_memory=gpu_memory,
        build=os.path.basename(MPI.__file__),
        standard_abi=MPI.Get_abi_version()[0] > 0,
    )


def _thread_level(MPI: Any) -> str:
    names = ("single", "funneled", "serialized", "multiple")
    levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in names}
    return levels[MPI.Query_thread()]


@collective
def horovod(framework: str) -> None:
    """All-reduce rank + 1 through an installed `horovod.FRAMEWORK` on two ranks."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    library = importlib.import_module(framework)
    make = library.tensor if framework == "torch" else library.constant
    own = make([hvd.rank() + 1.0] * _COUNT, dtype=library.float32)
    total = hvd.allreduce(own, op=hvd.Sum).numpy().tolist()
    if total != [3.0] * _COUNT:
        raise RuntimeError(f"horovod.{framework}: wrong sum on {hvd.size()} ranks: {total[:3]} ...")


@collective
def two_ranks() -> None:
    """All-reduce rank + 1 with the configured engine; rank 0 says the sums and where ranks are."""
    import numpy as np

    from hvdtrain.buffer import Buffer
    from hvdtrain.engines import choose_engine, open_world
    from hvdtrain.types import ReduceOp

    try:
        config = Config.from_environ(os.environ)
        world = open_world(choose_engine(config.engine, os.environ), config, os.environ)
    except HvdtrainError as error:
        sys.exit(f"hvdtrain: {error}")
    ranks = world.communicator
    array = np.full(_COUNT, ranks.rank + 1.0)
    ranks.allreduce(Buffer.from_array(array), ReduceOp.SUM)
    cores = np.empty(ranks.size, np.int64)
    own = np.array([len(os.sched_getaffinity(0))])
    ranks.allgather(Buffer.from_array(own), Buffer.from_array(cores), [1] * ranks.size)
    if ranks.rank == 0:
        _answer(
            engine=world.engine,
            library=world.library,
            size=ranks.size,
            cores=cores.tolist(),
            nodes=len(set(world.nodes)),
            hosts=len(set(world.hostnames)),
            sums=sorted(set(array.tolist())),
        )
    ranks.close()


@collective
def links(seconds: str, rank: str, *interfaces: str) -> None:
    """Try MPI between all pairs of ranks, and TCP from each rank to the next on `interfaces`.

    A rank says at once that it waits for all, -1, and after `seconds` for which one it still does.
    """
    state: dict[str, Any] = {"rank": int(rank), "waits_for": -1}
    _answer(**state)  # MPI_Init holds the GIL
    watch = threading.Timer(float(seconds), lambda: _answer(**state))
    watch.daemon = True
    watch.start()
    try:
        _try_links(state, interfaces)
    except Exception as error:
        _answer(rank=int(rank), failed=" ".join(f"{type(error).__name__}: {error}".split()))
        sys.exit(EXIT_CRASH)


@collective
def _try_links(state: dict[str, Any], interfaces: Sequence[str]) -> None:
    from hvdtrain.engines.mpi.engine import initialize, load_mpi
    from hvdtrain.engines.shared_memory import memory

    MPI = load_mpi()
    initialize(MPI, os.environ)
    world = MPI.COMM_WORLD
    own, size = world.Get_rank(), world.Get_size()
    messages: list[tuple[int, float, float]] = []
    for turn in range(1, 1 << (size - 1).bit_length()):
        if (peer := own ^ turn) < size:
            state["waits_for"] = peer
            messages += ((peer, *found) for found in _exchange(world, own, peer))
    state["waits_for"] = -1
    nodes = memory.detect_nodes(world.allgather)
    machines = world.allgather(memory.machine_identity())
    apart = nodes if isinstance(nodes, str) else memory.unreadable_peers(nodes, machines)
    answer = {
        "rank": own,
        "size": size,
        "level": _thread_level(MPI),
        "no_shared_memory": apart if own == 0 else "",
        "messages": messages,
        "tcp": _reach_next(world, interfaces),
    }
    # Launchers may mix long lines of ranks that print at once.
    for each in world.gather(answer) or ():
        _answer(**each)
    MPI.Finalize()


def _exchange(world: Any, own: int, peer: int) -> list[tuple[float, float]]:
    """Return the least microseconds of a message, and by how many seconds the peer is ahead.

    Of the lower rank; the other one answers, and returns nothing.
    """
    taken = []
    for _ in range(_MESSAGES):
        if own > peer:
            world.recv(source=peer)
            world.send(time.time(), peer)
            continue
        sent, started = time.time(), time.perf_counter()
        world.send(None, peer)
        theirs = world.recv(source=peer)
        half = (time.perf_counter() - started) / 2
        taken.append((round(half * 1e6, 1), round(theirs - sent - half, 3)))
    return sorted(taken)[:1]


def _reach_next(world: Any, interfaces: Sequence[str]) -> dict[str, str | None]:
    """Return "", why the next rank is not reached, or None if it has none, for each interface."""
    reached: dict[str, str | None] = {}
    found = {name: address for name in interfaces if (address := interface_address(name))}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(socket.create_server((address, 0)))
            for name, address in found.items()
        }
        ranks = world.allgather({name: one.getsockname() for name, one in servers.items()})
        theirs = ranks[(world.Get_rank() + 1) % len(ranks)]
        for name, address in found.items():
            reached[name] = "" if name in theirs else None
            if name in theirs:
                try:
                    socket.create_connection(theirs[name], 2, (address, 0)).close()
                except OSError as error:
                    reached[name] = error.strerror or str(error)
        world.Barrier()
    return reached


def _answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
