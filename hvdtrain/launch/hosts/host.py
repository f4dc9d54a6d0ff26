"""Hosts with their slots, and errors in a list of them."""

from __future__ import annotations

import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvdtrain.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?")
_PLACEHOLDER = re.compile(r"name_of_node\d*|<.*>|\$\{?\w+\}?|(node|host)name", re.IGNORECASE)
_LARGEST = 1 << 20


class HostfileError(UsageError):
    """An error in a hostfile, or in a scheduler's list of hosts."""

    def __init__(self, where: str, token: str, mend: str) -> None:
        shown = f"{token!r}: " if token else ""
        super().__init__(f"{where}: {shown}{mend}")


@dataclass(frozen=True)
class Host:
    """A host on which ranks can be started."""

    name: str
    slots: int | None = None
    user: str = ""
    others: tuple[str, ...] = ()

    @property
    def login(self) -> str:
        """The name, after the user's if there is one."""
        return f"{self.user}@{self.name}" if self.user else self.name


@dataclass(frozen=True)
class HostText:
    """A text that lists hosts."""

    name: str
    text: str
    foreign: bool = False

    def lines(self) -> list[tuple[str, str]]:
        """Return "name:number" and the stripped text of each line that is not blank."""
        numbered = enumerate(self.text.splitlines(), 1)
        return [
            (f"{self.name}:{number}", line.strip()) for number, line in numbered if line.strip()
        ]


def check_name(name: str, where: str, *, ipv6: bool = False) -> str:
    """Return a host's name, if it is a valid one."""
    if _PLACEHOLDER.fullmatch(name):
        raise HostfileError(where, name, "is a placeholder: replace it by the name of a host")
    if _NAME.fullmatch(name) and len(name) <= 253:
        return name
    if ":" in name and _IPV6.fullmatch(name):
        if ipv6:
            return name
        raise HostfileError(where, name, "an IPv6 address cannot stand here: use a host's name")
    raise HostfileError(
        where, name, "is not a host name: use letters, digits, dots and dashes, as in node1"
    )


def check_slots(text: str, where: str, token: str) -> int:
    """Return a number of slots."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        raise HostfileError(where, token, "needs an integer of at least 1")
    if int(text) > _LARGEST:
        raise HostfileError(where, token, f"is more than any host has: at most {_LARGEST} slots")
    return int(text)


def total_slots(hosts: Iterable[Host]) -> int:
    """Return the number of slots of all hosts; a host without a number counts as 0."""
    return sum(host.slots or 0 for host in hosts)


def add_up(hosts: Sequence[Host]) -> list[Host]:
    """Merge hosts that are listed several times into the first of them, and add their slots."""
    found: dict[str, Host] = {}
    for host in hosts:
        before = found.get(host.name)
        if before is None:
            found[host.name] = host
        else:
            slots = (before.slots or 0) + (host.slots or 0)
            user, others = before.user or host.user, before.others + host.others
            found[host.name] = replace(before, slots=slots, user=user, others=others)
    return list(found.values())


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
        if is_here(host.name):
            here.add(host.name)
        if not host.name.replace(".", "").isdecimal():
            names[host.name.partition(".")[0]].add(host.name)
    mixed = [given for short, given in names.items() if short in given and not given <= here]
    return [
        f"{' and '.join(sorted(several))}: one host under two names: write it in one way"
        for several in (*mixed, here)
        if len(several) > 1
    ]


def is_here(name: str) -> bool:
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
