"""Hosts with their slots, and errors in a list of them."""

from __future__ import annotations

import re
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
