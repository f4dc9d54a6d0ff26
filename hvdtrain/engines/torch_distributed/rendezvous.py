"""How ranks find each other for torch.distributed: through MPI or torchrun, or as one rank."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.engines.mpi import engine as mpi_engine
from hvdtrain.engines.shared_memory.node_detection import detect_nodes
from hvdtrain.engines.torch_distributed.failures import TorchFailures
from hvdtrain.engines.torch_distributed.master_address import (
    MasterAddress,
    find_master_address,
)
from hvdtrain.errors import HvdtrainError
from hvdtrain.world import promised_world, under_launcher

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class RankInfo:
    """This rank's view of the job before process groups are created."""

    store: dist.Store
    rank: int
    size: int
    address: str
    nodes: tuple[int, ...]
    hostnames: tuple[str, ...]
    abort: Callable[[int], None]
    leave: Callable[[], None]
    failures: TorchFailures | None = None


@collective
def open_on_ranks(
    config: Config,
    environ: Mapping[str, str],
    open_on: Callable[[RankInfo], EngineWorld],
    takes_newcomers: bool,
) -> EngineWorld:
    """Find all ranks of the job, and open a world of them."""
    if _has_torchrun(environ):
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        with _reporting(rank, size):
            found = _through_torchrun(rank, size, environ)
        return open_on(found)
    if not under_launcher(environ):
        return open_on(_alone())

    def open_through(world: EngineWorld) -> EngineWorld:
        failures = None
        if world.failures is not None:
            failures = TorchFailures(world.failures, takes_newcomers)
        return open_on(_through_mpi(world, failures, environ))

    return mpi_engine.open_world(config, environ, open_through)


def _has_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether all of torchrun's variables are set and agree with the launcher."""
    promised = promised_world(environ)
    return (
        all(environ.get(name) for name in _VARIABLES)
        and promised is not None
        and environ["RANK"] == str(promised.rank)
        and environ["WORLD_SIZE"] == str(promised.size)
    )


def _alone() -> RankInfo:
    name = socket.gethostname()
    return RankInfo(dist.HashStore(), 0, 1, "127.0.0.1", (0,), (name,), os._exit, _nothing)


def _through_mpi(
    world: EngineWorld, failures: TorchFailures | None, environ: Mapping[str, str]
) -> RankInfo:
    """Find the ranks through MPI, and open a store on rank 0."""
    mpi = world.communicator
    master = find_master_address(lambda value: _gather_objects(mpi, value), mpi.rank, environ)
    open_store = partial(_open_store, master, mpi.rank, mpi.size)
    with _reporting(mpi.rank, mpi.size):
        store = open_store() if failures is None else failures.unless_lost(open_store)
    return RankInfo(
        store=store,
        rank=mpi.rank,
        size=mpi.size,
        address=master.address,
        nodes=world.nodes,
        hostnames=world.hostnames,
        abort=mpi.abort,
        leave=mpi.close,
        failures=failures,
    )


def _open_store(master: MasterAddress, rank: int, size: int) -> dist.Store:
    return dist.TCPStore(
        master.host,
        master.port,
        size,
        is_master=rank == 0,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=master.listener.detach() if master.listener else None,
    )


def _through_torchrun(rank: int, size: int, environ: Mapping[str, str]) -> RankInfo:
    """Find the ranks through torchrun's store, or one that rank 0 opens at MASTER_ADDR."""
    shared, _, _ = next(dist.rendezvous("env://", rank, size, timeout=_TIMEOUT))
    joins = shared.add(
        f"hvdtrain/joins of rank {rank}", 1
    )  # init() may be called again after shutdown()
    store = dist.PrefixStore(f"hvdtrain/{joins}", shared)
    allgather = _StoreGather(store, rank, size)
    master = find_master_address(allgather, rank, environ)
    if master.listener is not None:
        master.listener.close()
    hostnames = tuple(allgather(socket.gethostname()))
    detected = detect_nodes(allgather)
    return RankInfo(
        store=store,
        rank=rank,
        size=size,
        address=master.address,
        nodes=tuple(map(hostnames.index, hostnames)) if isinstance(detected, str) else detected,
        hostnames=hostnames,
        abort=os._exit,
        leave=_nothing,
    )


class _StoreGather:
    """Gathers JSON values through a store; pickles would let anyone who reaches it run code."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._round = 0

    def __call__(self, value: Any) -> list[Any]:
        self._round += 1
        self._store.set(f"{self._round}/{self._rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{self._round}/{r}")) for r in range(self._size)]


def _gather_objects(communicator: Communicator, value: Any) -> list[Any]:
    size = communicator.size
    own = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
    count, counts = np.array([own.size]), np.empty(size, np.int64)
    communicator.allgather(Buffer.from_array(count), Buffer.from_array(counts), [1] * size)
    texts = np.empty(int(counts.sum()), np.uint8)
    communicator.allgather(Buffer.from_array(own), Buffer.from_array(texts), counts.tolist())
    return [json.loads(text.tobytes()) for text in np.split(texts, np.cumsum(counts)[:-1])]


@contextmanager
def _reporting(rank: int, size: int) -> Iterator[None]:
    try:
        yield
    except HvdtrainError:
        raise
    except (RuntimeError, ValueError) as error:  # the store may also return something else
        reason = str(error).splitlines()[0]
        raise HvdtrainError(
            f"[rank {rank}/{size}] the ranks could not connect to each other ({reason}). Start all "
            "of them within five minutes, where they can reach rank 0"
        ) from error


def _nothing() -> None:
    pass
