"""The environment variables in which frameworks find their ranks. Pure."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.topology import interface_address

_LOWEST = 15_000
_TRIALS = 100
# Linux's range of ports for connections, and for sockets that ask for any port.
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "") -> int:
    """Return a port of this host on which no process listens: one of free_ports."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "") -> list[int]:
    """Return different ports of this host on which no process listens.

    They are drawn below the range from which the kernel gives out ports, so that no connection
    takes them before the servers are there. Where that range begins too low, they are of the
    kernel's.
    """
    with ExitStack() as stack:
        return [_bound_port(host, stack) for _ in range(count)]


def _bound_port(host: str, stack: ExitStack) -> int:
    """Return a free port, which is bound until the stack is closed."""
    highest = _LOWEST
    with suppress(OSError, ValueError, IndexError):
        highest = int(_KERNELS_RANGE.read_text().split()[0])
    draw = random.SystemRandom()  # seeds of a program must not give all ranks the same port
    ports = [draw.randrange(_LOWEST, highest) for _ in range(_TRIALS)] if highest > _LOWEST else []
    for port in [*ports, 0]:
        probe = stack.enter_context(socket.socket())  # which never listens
        with suppress(OSError):
            probe.bind((host, port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no port of {host or 'this host'} is free")


def own_addresses(interface: str | None = None) -> list[str]:
    """Return the addresses of this host's network interfaces, the loopback's last."""
    names = [name for _, name in socket.if_nameindex()]
    found = {name: address for name in names if (address := interface_address(name))}
    if interface in found:
        return [found[interface]]
    return sorted(found.values(), key=lambda address: address.startswith("127."))


# Few enough digits that the list of roles fits into memory.
_COUNT = re.compile("[0-9]{1,7}")
# A master is a chief, by the name that TensorFlow 1 gave it.
_ROLES = ("chief", "master", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class ClusterRank:
    """The place of this rank in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    addresses: tuple[str, ...]
    control_addresses: tuple[str, ...] = ()


def torch_variables(place: ClusterRank) -> dict[str, str]:
    """Return the variables of `init_method="env://"`, which Accelerate and Lightning read too."""
    host, _, port = place.addresses[0].rpartition(":")
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "NODE_RANK": place.node,
        "GROUP_RANK": place.node,
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def jax_variables(place: ClusterRank) -> dict[str, str]:
    """Return the variables of `jax.distributed.initialize` and `keras.distribution.initialize`."""
    coordinator = place.addresses[0]
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": coordinator,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(place.size),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(place.rank),
    }


def parse_roles(text: str) -> list[str]:
    """Return the role of each rank: "chief:1,worker:2" is chief, worker, worker."""
    roles: list[str] = []
    for part in text.split(","):
        role, _, count = part.strip().partition(":")
        if role not in _ROLES or not _COUNT.fullmatch(count):
            known = ", ".join(_ROLES)
            raise UsageError(f"--roles: {part!r} must be one of {known}, a colon, and a number")
        roles += [role] * int(count)
    if roles.count("chief") + roles.count("master") > 1 or roles.count("evaluator") > 1:
        raise UsageError(f"--roles {text}: there can be one chief and one evaluator only")
    return roles


def check_roles(roles: Sequence[str], size: int) -> None:
    """Check that each rank has a role."""
    if len(roles) != size:
        raise UsageError(f"--roles are of {len(roles)} ranks, but there are {size}")


def tensorflow_config(place: ClusterRank, roles: Sequence[str]) -> str:
    """Return TF_CONFIG, in whose cluster evaluators are not members."""
    members: dict[str, list[str]] = {}
    for role, address in zip(roles, place.addresses, strict=True):
        if role != "evaluator":
            members.setdefault(role, []).append(address)
    role = roles[place.rank]
    task = {"type": role, "index": list(roles[: place.rank]).count(role)}
    return json.dumps({"cluster": members, "task": task})
