"""How ranks find each other for torch.distributed: through MPI or torchrun, or as one rank."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.engines.communicator import EngineWorld, Gather
from hvdtrain.engines.mpi import engine as mpi_engine
from hvdtrain.engines.shared_memory.memory import detect_nodes
from hvdtrain.engines.torch_distributed.failures import Members, TorchFailures
from hvdtrain.errors import EngineUnavailableError, HvdtrainError
from hvdtrain.topology import LOOPBACK, interface_address
from hvdtrain.world import promised_world, under_launcher

_PROBE_SECONDS = 3.0

_Endpoint = tuple[str, int]


@dataclass(frozen=True)
class MasterAddress:
    """The address on which rank 0 listens, and this rank's own."""

    host: str
    port: int
    address: str
    listener: socket.socket | None


@collective
def find_master_address(allgather: Gather, rank: int, environ: Mapping[str, str]) -> MasterAddress:
    """Find an address of rank 0 that every rank reaches, by connecting to it.

    Ranks that share a loopback device use it. Otherwise rank 0 listens on each of its addresses, or
    on those of the interfaces named in GLOO_SOCKET_IFNAME.
    """
    networks = allgather(_network())
    listeners = _listen(_candidates(networks, environ)) if rank == 0 else []
    offered: list[_Endpoint] = allgather([listener.getsockname()[:2] for listener in listeners])[0]
    replies = allgather([host if rank == 0 else _reach(host, port) for host, port in offered])
    chosen = next((i for i in range(len(offered)) if all(reply[i] for reply in replies)), None)
    for i, listener in enumerate(listeners):
        if i != chosen:
            listener.close()
    if chosen is None:
        raise EngineUnavailableError(_explain(offered, replies, environ))
    if rank == 0:
        _drain_probes(listeners[chosen])
    allgather(None)  # connections that are meant for the caller would be drained
    return MasterAddress(
        *offered[chosen], replies[rank][chosen], listeners[chosen] if rank == 0 else None
    )


def _network() -> str:
    """Return an identifier of this host's boot and of this process's network namespace."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def _candidates(networks: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of rank 0 to try, the most likely first."""
    if named := environ.get("GLOO_SOCKET_IFNAME"):
        return [a for name in named.split(",") if (a := interface_address(name.strip()))]
    if len(set(networks)) == 1:
        return [LOOPBACK]
    interfaces = [interface_address(name) for _, name in socket.if_nameindex()]
    found = [*_addresses_of(socket.gethostname()), *filter(None, interfaces)]
    return [a for a in dict.fromkeys(found) if not a.startswith(("127.", "::1", "fe80"))]


def _addresses_of(host: str) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _listen(addresses: Sequence[str]) -> list[socket.socket]:
    listeners = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listeners.append(socket.create_server((address, 0), family=family, backlog=4096))
        except OSError:  # a resolved address may not belong to this host
            continue
    return listeners


def _reach(host: str, port: int) -> str | None:
    """Connect, and return the local address of the connection; None if that fails."""
    try:
        with socket.create_connection((host, port), _PROBE_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None


def _drain_probes(listener: socket.socket) -> None:
    listener.setblocking(False)
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return


def _explain(
    offered: Sequence[_Endpoint],
    replies: Sequence[Sequence[str | None]],
    environ: Mapping[str, str],
) -> str:
    named = environ.get("GLOO_SOCKET_IFNAME")
    if not offered:
        which = f"GLOO_SOCKET_IFNAME={named}" if named else "no interface"
        return f"rank 0 has no address to listen on ({which}): name an interface that is up"
    missed = [str(rank) for rank, reply in enumerate(replies) if not all(reply)]
    tried = ", ".join(host for host, _ in offered)
    return (
        f"no address of rank 0 is reached by every rank (tried {tried}; missed by rank "
        f"{', '.join(missed)}): set GLOO_SOCKET_IFNAME to the interface that all hosts share"
    )


_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(seconds=300)


# Opens a world of members with their nodes and host names.
_Open = Callable[[Members, tuple[int, ...], tuple[str, ...]], EngineWorld]


@collective
def open_on_ranks(
    config: Config, environ: Mapping[str, str], open_on: _Open, takes_newcomers: bool
) -> EngineWorld:
    """Find all ranks of the job, and open a world of them."""
    promised = promised_world(environ)
    # All of torchrun's variables are set, and agree with the launcher.
    if (
        all(environ.get(name) for name in _VARIABLES)
        and promised is not None
        and environ["RANK"] == str(promised.rank)
        and environ["WORLD_SIZE"] == str(promised.size)
    ):
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        with _reporting(rank, size):
            found = _through_torchrun(rank, size, environ)
        return open_on(*found)
    if not under_launcher(environ):
        members = Members(dist.HashStore(), 0, 1, _device_at(LOOPBACK))
        return open_on(members, (0,), (socket.gethostname(),))

    def open_through(world: EngineWorld) -> EngineWorld:
        failures = None
        if world.failures is not None:
            failures = TorchFailures(world.failures, takes_newcomers)
        mpi = world.communicator
        master = find_master_address(mpi.gather_objects, mpi.rank, environ)
        open_store = partial(_open_store, master, mpi.rank, mpi.size)
        with _reporting(mpi.rank, mpi.size):
            store = open_store() if failures is None else failures.unless_lost(open_store)
        device = _device_at(master.address)
        members = Members(store, mpi.rank, mpi.size, device, mpi.abort, mpi.close, failures)
        return open_on(members, world.nodes, world.hostnames)

    return mpi_engine.open_world(config, environ, open_through)


def _device_at(address: str) -> dist.ProcessGroupGloo.Device:
    return dist.ProcessGroupGloo.create_device(hostname=address)


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


@collective
def _through_torchrun(
    rank: int, size: int, environ: Mapping[str, str]
) -> tuple[Members, tuple[int, ...], tuple[str, ...]]:
    """Find the ranks through torchrun's store, or one that rank 0 opens at MASTER_ADDR."""
    shared, _, _ = next(dist.rendezvous("env://", rank, size, timeout=_TIMEOUT))
    # init() may be called again after shutdown()
    joins = shared.add(f"hvdtrain/joins of rank {rank}", 1)
    store = dist.PrefixStore(f"hvdtrain/{joins}", shared)
    allgather = _StoreGather(store, rank, size)
    master = find_master_address(allgather, rank, environ)
    if master.listener is not None:
        master.listener.close()
    hostnames = tuple(allgather(socket.gethostname()))
    detected = detect_nodes(allgather)
    nodes = tuple(map(hostnames.index, hostnames)) if isinstance(detected, str) else detected
    return Members(store, rank, size, _device_at(master.address)), nodes, hostnames


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
