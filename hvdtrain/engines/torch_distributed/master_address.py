"""An address and port of rank 0 that all ranks can reach.

The port is bound before it is announced, since another process could take it in between. Addresses
are used instead of names, which may resolve differently on other hosts, and rank 0 does not listen
on all interfaces, where anyone could connect.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.collective import collective
from hvdtrain.engines.allgather import Allgather
from hvdtrain.errors import EngineUnavailableError

_LOOPBACK = "127.0.0.1"
_PROBE_SECONDS = 3.0
_SIOCGIFADDR = 0x8915

_Endpoint = tuple[str, int]


@dataclass(frozen=True)
class MasterAddress:
    """The address on which rank 0 listens, and this rank's own."""

    host: str
    port: int
    address: str
    listener: socket.socket | None


@collective
def find_master_address(
    allgather: Allgather, rank: int, environ: Mapping[str, str]
) -> MasterAddress:
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
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def _candidates(networks: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of rank 0 to try, the most likely first."""
    if named := environ.get("GLOO_SOCKET_IFNAME"):
        return [a for name in named.split(",") if (a := _interface_address(name.strip()))]
    if len(set(networks)) == 1:
        return [_LOOPBACK]
    interfaces = [_interface_address(name) for _, name in socket.if_nameindex()]
    found = [*_addresses_of(socket.gethostname()), *filter(None, interfaces)]
    return [a for a in dict.fromkeys(found) if not a.startswith(("127.", "::1", "fe80"))]


def _addresses_of(host: str) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _interface_address(name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:  # no such interface, or it has no IPv4 address
            return None
    return socket.inet_ntoa(reply[20:24])


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
