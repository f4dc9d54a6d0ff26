"""Hosts with their slots, and what is wrong with a list of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvdtrain.errors import UsageError

__all__ = [
    "Host",
    "HostText",
    "HostfileError",
    "add_up",
    "check_name",
    "check_slots",
    "total_slots",
]

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%\w+)?")
_PLACEHOLDER = re.compile(r"name_of_node\d*|<.*>|\$\{?\w+\}?|(node|host)name", re.IGNORECASE)
_LARGEST = 1 << 20


class HostfileError(UsageError):
    """A hostfile, or a scheduler's list of hosts, that makes no sense.

    Args:
        where: file and line, or a variable's name.
        token: what is wrong, as it stands there; empty for the whole.
        mend: the reason, and what to write instead.
    """

    def __init__(self, where: str, token: str, mend: str) -> None:
        shown = f"{token!r}: " if token else ""
        super().__init__(f"{where}: {shown}{mend}")


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        name: as the launcher is told it.
        slots: how many ranks it takes; None where nobody has said.
        user: who logs in there; empty for who starts the job.
        others: what its line says besides, as in `port=22`; no form is written with it.
    """

    name: str
    slots: int | None = None
    user: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostText:
    """A text that names hosts.

    Attributes:
        name: of the file or the variable.
        text: what is in it.
        foreign: whether it has a byte-order mark or CRLF, which launchers do not take.
    """

    name: str
    text: str
    foreign: bool = False

    def lines(self) -> list[tuple[str, str]]:
        """Return its lines without the blank ones: "name:number", and the line stripped."""
        numbered = enumerate(self.text.splitlines(), 1)
        return [
            (f"{self.name}:{number}", line.strip()) for number, line in numbered if line.strip()
        ]


def check_name(name: str, where: str, *, ipv6: bool = False) -> str:
    """Return a host's name.

    Raises:
        HostfileError: it is still a placeholder, or no name at all.
    """
    if _PLACEHOLDER.fullmatch(name):
        raise HostfileError(where, name, "is a placeholder: put the name of a host there")
    if _NAME.fullmatch(name) and len(name) <= 253:
        return name
    if ":" in name and _IPV6.fullmatch(name):
        if ipv6:
            return name
        raise HostfileError(where, name, "an IPv6 address cannot stand here: use a host's name")
    raise HostfileError(
        where, name, "is no host's name: write letters, digits, dots and dashes, as in node1"
    )


def check_slots(text: str, where: str, token: str) -> int:
    """Return a number of slots.

    Raises:
        HostfileError: it is not a whole number from 1 to a million.
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        raise HostfileError(where, token, "needs a whole number, at least 1")
    if int(text) > _LARGEST:
        raise HostfileError(where, token, f"is more than any host has: at most {_LARGEST} slots")
    return int(text)


def total_slots(hosts: Iterable[Host]) -> int:
    """Return the slots of all hosts; one without a number counts nothing."""
    return sum(host.slots or 0 for host in hosts)


def add_up(hosts: Sequence[Host]) -> list[Host]:
    """Put the slots of a host that is listed several times together, where it stands first."""
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
