"""Hostfiles of Open MPI and of Hydra, MPICH's launcher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.launch.hosts.host import (
    Host,
    HostfileError,
    HostText,
    add_up,
    check_name,
    check_slots,
)

_SLOTS = {"slots", "cpu", "count"}
_MOST = {f"{a}{dash}{b}" for dash in "_-" for a, b in (("max", "slots"), ("slots", "max"))}
_MOST |= {
    f"{a}{dash}{b}"
    for dash in "_-"
    for word in ("cpu", "count")
    for a, b in (("max", word), (word, "max"))
}
_OTHERS = {"port", "username"}
_COMMENT = re.compile(r"/\*.*?\*/|(#|//).*")
_HOST_AND_COUNT = re.compile(r"([^:]+):(\d+)")


def read_open_mpi(source: HostText) -> list[Host]:
    """Return the hosts of a hostfile, each once."""
    _refuse_open_comment(source)
    listed: list[tuple[str, Host]] = []
    for where, line in source.lines():
        text = _COMMENT.sub(" ", line)
        if "/*" in text:
            raise HostfileError(where, "/*", "this comment does not end: write */ in the same line")
        tokens = re.sub(r"\s*=\s*", "=", text).split()
        if tokens:
            listed.append((where, _host(tokens, where)))
    return _once(listed)


def write_open_mpi(hosts: Sequence[Host]) -> str:
    """Return a hostfile with the number of slots of every host."""
    return "".join(
        f"{host.user}@{host.name} slots={host.slots}\n"
        if host.user
        else f"{host.name} slots={host.slots}\n"
        for host in hosts
    )


def _refuse_open_comment(source: HostText) -> None:
    last = source.text.rpartition("\n")[2]
    if any(comment[1] for comment in _COMMENT.finditer(last)):
        where = f"{source.name}:{len(source.text.splitlines())}"
        mend = "Open MPI needs a newline after a comment: end this line with one"
        raise HostfileError(where, "", mend)


def _host(tokens: Sequence[str], where: str) -> Host:
    first, *rest = tokens
    _refuse_foreign(first, where)
    user, _, name = first.rpartition("@")
    numbers: dict[str, int] = {}
    others = []
    for token in rest:
        key, sign, value = token.partition("=")
        if not sign:
            _refuse_word(token, name, where)
        if key in _OTHERS:
            user = value if key == "username" else user
        elif key in _SLOTS | _MOST:
            kind = "most" if key in _MOST else "slots"
            if kind in numbers:
                raise HostfileError(where, token, "is a second number: Open MPI takes one")
            numbers[kind] = check_slots(value, where, token)
        else:
            _refuse_key(key, token, where)
        if key == "port" or key in _MOST:
            others.append(token)
    slots, most = numbers.get("slots"), numbers.get("most")
    if slots is not None and most is not None and most < slots:
        raise HostfileError(where, f"max_slots={most}", f"is less than slots={slots}: raise it")
    return Host(check_name(name, where, ipv6=True), slots, user, tuple(others))


def _refuse_foreign(first: str, where: str) -> None:
    if match := _HOST_AND_COUNT.fullmatch(first):
        mend = (
            "is MPICH's form, which Open MPI takes for a host's name: "
            f"write '{match[1]} slots={match[2]}'"
        )
        raise HostfileError(where, first, mend)
    if "," in first:
        raise HostfileError(
            where, first, "Open MPI takes it for one host's name: one host per line"
        )
    if first.startswith(("^", "+", "rank=")) or first == "rank":
        mend = (
            "excluded and relative hosts and rankfiles are not read here: name the hosts themselves"
        )
        raise HostfileError(where, first, mend)


def _refuse_word(token: str, name: str, where: str) -> None:
    if token.isascii() and token.isdecimal():
        raise HostfileError(where, token, f"Open MPI ignores it: write '{name} slots={token}'")
    raise HostfileError(where, token, f"is unexpected: write '{name} slots=N', one host per line")


def _refuse_key(key: str, token: str, where: str) -> None:
    if key.lower() in _SLOTS | _MOST | _OTHERS:
        raise HostfileError(where, token, f"Open MPI needs it in lower case: {key.lower()}=")
    raise HostfileError(where, token, "Open MPI knows slots=, max_slots=, port= and username=")


def _once(listed: Sequence[tuple[str, Host]]) -> list[Host]:
    """Merge hosts that are listed again, with one slot for each listing, as Open MPI does."""
    lines: dict[str, list[str]] = {}
    for where, host in listed:
        lines.setdefault(host.name, []).append(where)
    hosts = []
    for _, host in listed:
        first, *again = lines[host.name]
        if again and host.slots is not None:
            mend = f"is also in {first}, which goes only without slots=: list it once"
            raise HostfileError(again[0], host.name, mend)
        hosts.append(replace(host, slots=1) if again else host)
    return add_up(hosts)


def read_hydra(source: HostText) -> list[Host]:
    """Return the hosts of a hostfile, each once; a host without a number has one slot."""
    return add_up([_hydra_host(line, where) for where, line in source.lines() if line[0] != "#"])


def write_hydra(hosts: Sequence[Host]) -> str:
    """Return a hostfile with the number of slots of every host."""
    return "".join(
        f"{host.name}:{host.slots}" + (f" user={host.user}" if host.user else "") + "\n"
        for host in hosts
    )


def _hydra_host(line: str, where: str) -> Host:
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
