"""Hostfiles of MPICH and Intel MPI, whose launcher is Hydra: `node1:4`."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.launch.hosts.host import (
    Host,
    HostfileError,
    HostText,
    add_up,
    check_name,
    check_slots,
)


def read(source: HostText) -> list[Host]:
    """Return the hosts of a hostfile, each once; a host without a number has one slot."""
    return add_up([_host(line, where) for where, line in source.lines() if line[0] != "#"])


def write(hosts: Sequence[Host]) -> str:
    """Return a hostfile with the number of slots of every host."""
    return "".join(
        f"{host.name}:{host.slots}" + (f" user={host.user}" if host.user else "") + "\n"
        for host in hosts
    )


def _host(line: str, where: str) -> Host:
    first, *rest = line.split()
    name, colon, count = first.partition(":")
    user, others = "", []
    for token in rest:
        key, _, value = token.partition("=")
        if key == "user" and value:
            user = value
        elif key == "binding" and value:
            others.append(token)
        else:
            raise HostfileError(where, token, _mend(token, name))
    if first.count(":") > 1:
        raise HostfileError(where, first, "an IPv6 address cannot stand here: use a host's name")
    slots = check_slots(count, where, first) if colon else 1
    return Host(check_name(name, where), slots, user, tuple(others))


def _mend(token: str, name: str) -> str:
    if token.startswith("slots"):
        return f"is Open MPI's form: write '{name}:{token.partition('=')[2] or 'N'}'"
    if token.startswith("#"):
        return "MPICH takes a comment only in a line of its own"
    if token.isascii() and token.isdecimal():
        return f"is unexpected: write '{name}:{token}'"
    return f"is unexpected: write '{name}:N', one host per line; MPICH knows binding= and user="
