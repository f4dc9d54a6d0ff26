"""How the ranks of torch.distributed find each other: through MPI, torchrun, or alone."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.mpi import engine as mpi_engine
from hvdtrain.engines.shared_memory.proof import prove_nodes
from hvdtrain.engines.torch_distributed.meeting import MeetingPoint, meet
from hvdtrain.errors import HvdtrainError
from hvdtrain.world import promised_world, under_launcher

__all__ = ["Found", "find_ranks"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(seconds=300)


@dataclass(frozen=True)
class Found:
    """All ranks of the job, before there is a process group.

    Attributes:
        store: where they exchange addresses; nobody else writes to it.
        rank: the number of this rank.
        size: how many there are.
        address: of this rank, for the others to connect to.
        nodes: for each rank a number that is equal exactly for ranks that share memory.
        hostnames: for each rank its host name.
        abort: ends every rank of the job with an exit code.
        leave: gives back what was used to find them.
    """

    store: dist.Store
    rank: int
    size: int
    address: str
    nodes: tuple[int, ...]
    hostnames: tuple[str, ...]
    abort: Callable[[int], None]
    leave: Callable[[], None]


def find_ranks(config: Config, environ: Mapping[str, str]) -> Found:
    """Meet all ranks of the job (collective).

    Raises:
        EngineUnavailableError: no MPI is installed, or ranks cannot reach each other.
        LauncherMismatchError: the launcher belongs to another MPI than the library.
        HvdtrainError: ranks do not come in time.
    """
    if _has_torchrun(environ):
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        with _reporting(rank, size):
            return _through_torchrun(rank, size, environ)
    if under_launcher(environ):
        return _through_mpi(config, environ)
    return _alone()


def _has_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun's variables are all there, and mean what the launcher means."""
    promised = promised_world(environ)
    return (
        all(environ.get(name) for name in _VARIABLES)
        and promised is not None
        and environ["RANK"] == str(promised.rank)
        and environ["WORLD_SIZE"] == str(promised.size)
    )


def _alone() -> Found:
    name = socket.gethostname()
    return Found(dist.HashStore(), 0, 1, "127.0.0.1", (0,), (name,), os._exit, _nothing)


def _through_mpi(config: Config, environ: Mapping[str, str]) -> Found:
    """Let MPI say who is there, and tell all of them where rank 0 listens."""
    world = mpi_engine.open_world(config, environ)
    mpi = world.communicator
    point = meet(lambda value: _gather_objects(mpi, value), mpi.rank, environ)
    with _reporting(mpi.rank, mpi.size):
        store = _open_store(point, mpi.rank, mpi.size)
    return Found(
        store=store,
        rank=mpi.rank,
        size=mpi.size,
        address=point.address,
        nodes=world.nodes,
        hostnames=world.hostnames,
        abort=mpi.abort,
        leave=mpi.close,
    )


def _open_store(point: MeetingPoint, rank: int, size: int) -> dist.Store:
    return dist.TCPStore(
        point.host,
        point.port,
        size,
        is_master=rank == 0,
        timeout=_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=point.listener.detach() if point.listener else None,
    )


def _through_torchrun(rank: int, size: int, environ: Mapping[str, str]) -> Found:
    """Meet in the store of torchrun, or in one that rank 0 opens at MASTER_ADDR."""
    shared, _, _ = next(dist.rendezvous("env://", rank, size, timeout=_PATIENCE))
    joins = shared.add(f"hvdtrain/joins of rank {rank}", 1)  # a world may be left and joined again
    store = dist.PrefixStore(f"hvdtrain/{joins}", shared)
    allgather = _StoreGather(store, rank, size)
    point = meet(allgather, rank, environ)
    if point.listener is not None:
        point.listener.close()
    hostnames = tuple(allgather(socket.gethostname()))
    proved = prove_nodes(allgather)
    return Found(
        store=store,
        rank=rank,
        size=size,
        address=point.address,
        nodes=tuple(map(hostnames.index, hostnames)) if isinstance(proved, str) else proved,
        hostnames=hostnames,
        abort=os._exit,
        leave=_nothing,
    )


class _StoreGather:
    """Gathers a value of every rank through a store, to which whoever reaches it may write."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
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
    except (RuntimeError, ValueError) as error:  # or found something else
        reason = str(error).splitlines()[0]
        raise HvdtrainError(
            f"[rank {rank}/{size}] the ranks did not find each other ({reason}). Start all of "
            "them within five minutes, where they can reach rank 0"
        ) from error


def _nothing() -> None:
    pass
