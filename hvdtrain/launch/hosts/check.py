"""Checks for mistakes in a list of hosts that launchers accept silently."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.launch.hosts.host import Host, HostfileError, total_slots


def objections(hosts: Sequence[Host], where: str) -> list[str]:
    """Return one line for each mistake that a launcher would accept without a warning."""
    found = [] if hosts else [f"{where}: names no host: write one host per line"]
    silent = [host.name for host in hosts if host.slots is None]
    if silent:
        found.append(
            f"{where}: {', '.join(silent[:5])}{' ...' * (len(silent) > 5)}: no slots=: Open MPI "
            "takes as many as the host has cores, so all ranks may land on the first host: write "
            "slots=N"
        )
    return found + [f"{where}: {line}" for line in mixed_names(hosts)]


def mixed_names(hosts: Sequence[Host]) -> list[str]:
    """Return one line for each host that is named with its domain and without, or as this host."""
    here, names = set(), defaultdict(set)
    for host in hosts:
        if _is_here(host.name):
            here.add(host.name)
        if not host.name.replace(".", "").isdecimal():
            names[host.name.partition(".")[0]].add(host.name)
    mixed = [given for short, given in names.items() if short in given and not given <= here]
    return [
        f"{' and '.join(sorted(several))}: one host under two names: write it in one way"
        for several in (*mixed, here)
        if len(several) > 1
    ]


def _is_here(name: str) -> bool:
    """Return whether a name is this host's, as far as that is known without asking a server."""
    own = socket.gethostname()
    return name in ("localhost", "::1", own, own.partition(".")[0]) or name.startswith("127.")


def require_slots(hosts: Sequence[Host], ranks: int, where: str) -> None:
    """Check that there is a slot for each rank."""
    if total_slots(hosts) < ranks:
        shown = ", ".join(f"{host.name} {host.slots or 0}" for host in hosts[:16])
        more = f", and {len(hosts) - 16} hosts more" if len(hosts) > 16 else ""
        raise HostfileError(
            where,
            "",
            f"{ranks} ranks need more than the {total_slots(hosts)} slots of {shown}{more}",
        )


def with_slots(hosts: Sequence[Host], slots: int | None, where: str) -> list[Host]:
    """Return the hosts, with `slots` for each that has no number of its own."""
    for host in hosts:
        if host.slots is None and slots is None:
            raise HostfileError(where, host.name, "has no number of slots: pass --slots N")
    return [replace(host, slots=host.slots or slots) for host in hosts]
