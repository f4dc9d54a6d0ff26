"""The lists of hosts that schedulers give to a job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, product

from hvdtrain.launch.hosts.host import (
    Host,
    HostfileError,
    HostText,
    add_up,
    check_name,
    check_slots,
)

_MOST_OF_A_RANGE = 65_536
_BRACKET = re.compile(r"\[([^][]*)\]")
_COUNT = re.compile(r"(\d{1,8})(?:\(x(\d{1,8})\))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")


def expand(text: str, where: str) -> list[str]:
    """Return the names of a list: n[1-2]a[0,3] is n1a0, n1a3, n2a0, n2a3."""
    names: list[str] = []
    for part in _split(text, where):
        pieces = _BRACKET.split(part)
        choices = [
            _range(piece, part, where) if number % 2 else [piece]
            for number, piece in enumerate(pieces)
        ]
        total = 1
        for choice in choices:
            total *= len(choice)
        if total > _MOST_OF_A_RANGE:
            raise HostfileError(where, part, f"is more than {_MOST_OF_A_RANGE} hosts")
        names += [check_name("".join(words), where) for words in product(*choices)]
    return names


def compress(names: Sequence[str]) -> str:
    """Return a host list that expand() reads back, with ranges for consecutive names."""
    return ",".join(_compressed(names))


def expand_counts(text: str, where: str) -> list[int]:
    """Return the numbers of a Slurm count list: 2(x3),1 is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise HostfileError(where, part, "is not a number of tasks: write it as in 2(x3),1")
        repeats = int(match[2] or 1)
        if len(counts) + repeats > _MOST_OF_A_RANGE:
            raise HostfileError(where, part, f"is more than {_MOST_OF_A_RANGE} hosts")
        counts += [check_slots(match[1], where, part)] * repeats
    return counts


def compress_counts(counts: Sequence[int]) -> str:
    """Return numbers as a Slurm count list."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


def _split(text: str, where: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text.strip():
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise HostfileError(where, text[:80], "has unbalanced brackets")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise HostfileError(where, parts[-1][:80], "has a bracket that is not closed: write ]")
    if not all(parts):
        raise HostfileError(where, text[:80], "has nothing between two commas")
    return parts


def _range(text: str, part: str, where: str) -> list[str]:
    names: list[str] = []
    for piece in text.split(","):
        low, dash, high = piece.partition("-")
        high = high if dash else low
        if not (low.isascii() and low.isdecimal() and high.isascii() and high.isdecimal()):
            raise HostfileError(
                where, part[:80], f"{piece!r} is not a range: write it as in [01-04,07]"
            )
        if max(len(low), len(high)) > 9:
            raise HostfileError(where, part[:80], f"{piece!r} has too many digits")
        first, last = int(low), int(high)
        if last < first:
            raise HostfileError(where, part[:80], f"{piece!r} runs backwards: write [{high}-{low}]")
        if last - first + len(names) >= _MOST_OF_A_RANGE:
            raise HostfileError(where, part[:80], f"is more than {_MOST_OF_A_RANGE} hosts")
        names += [str(number).zfill(len(low)) for number in range(first, last + 1)]
    return names


def _compressed(names: Sequence[str]) -> Iterator[str]:
    start = 0
    while start < len(names):
        end = start + 1
        while end < len(names) and names[end] == _successor(names[end - 1]):
            end += 1
        if end - start == 1:
            yield names[start]
        else:
            first, last = _NUMBERED.fullmatch(names[start]), _NUMBERED.fullmatch(names[end - 1])
            assert first is not None
            assert last is not None
            yield f"{first[1]}[{first[2]}-{last[2]}]"
        start = end


def _successor(name: str) -> str:
    """Return the next name of a range with the same number of digits, or ""."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return ""
    number = str(int(match[2]) + 1).zfill(len(match[2]))
    return match[1] + number if len(number) == len(match[2]) else ""


_NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS = ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")
_SETTING = re.compile(r"(?:export\s+)?(\w+)=(['\"]?)(.*)\2")
# Nodes that run the script of an LSF job, on machines that have such nodes.
_LAUNCH_NODE = re.compile(r"(batch|login)\d*(\..*)?")


def read_slurm(source: HostText) -> list[Host]:
    """Return the hosts in Slurm's two variables, as `env` prints them."""
    found = {
        match[1]: match[3] for _, line in source.lines() if (match := _SETTING.fullmatch(line))
    }
    nodes = next((found[name] for name in _NODES if found.get(name)), "")
    tasks = next((found[name] for name in _TASKS if found.get(name)), "")
    if not nodes:
        raise HostfileError(source.name, "", f"no {_NODES[0]}: call it within a job of Slurm")
    names = expand(nodes, _NODES[0])
    if not tasks:
        return [Host(name) for name in dict.fromkeys(names)]
    counts = expand_counts(tasks, _TASKS[0])
    if len(counts) != len(names):
        mend = f"tells of {len(counts)} hosts, but {_NODES[0]} of {len(names)}"
        raise HostfileError(_TASKS[0], tasks[:80], mend)
    return add_up([Host(*pair) for pair in zip(names, counts, strict=True)])


def write_slurm(hosts: Sequence[Host]) -> str:
    """Return Slurm's two variables."""
    counts = compress_counts([host.slots or 1 for host in hosts])
    return f"{_NODES[0]}={compress([h.name for h in hosts])}\n{_TASKS[0]}={counts}\n"


def read_lines(source: HostText) -> list[Host]:
    """Return the hosts of a file with one line per slot, as PBS and LSF write it."""
    return add_up([Host(check_name(line, where), 1) for where, line in source.lines()])


def write_lines(hosts: Sequence[Host]) -> str:
    """Return one line per slot."""
    return "".join(f"{host.name}\n" * (host.slots or 1) for host in hosts)


def write_names(hosts: Sequence[Host]) -> str:
    """Return one line per host without slots, for Fujitsu's PJM and PALS."""
    return "".join(f"{host.name}\n" for host in hosts)


def read_sge(source: HostText) -> list[Host]:
    """Return the hosts of $PE_HOSTFILE: `host slots queue processors`."""
    hosts = []
    for where, line in source.lines():
        name, *rest = line.split()
        if not rest:
            raise HostfileError(where, line, "lacks the number of slots: host slots queue")
        if len(rest) > 2 and rest[2].isdecimal():
            raise HostfileError(where, rest[2], "is another host's number, as in LSF's form")
        hosts.append(Host(check_name(name, where), check_slots(rest[0], where, rest[0])))
    return add_up(hosts)


def write_sge(hosts: Sequence[Host]) -> str:
    """Return a $PE_HOSTFILE."""
    return "".join(f"{h.name} {h.slots} all.q@{h.name} <NULL>\n" for h in hosts)


def read_lsf(source: HostText) -> list[Host]:
    """Return the hosts of $LSB_MCPU_HOSTS, `host1 4 host2 4`, without the job script's node."""
    words = source.text.split()
    if len(words) % 2:
        raise HostfileError(source.name, words[-1], "has no number after it: write host slots")
    pairs = list(zip(words[::2], words[1::2], strict=True))
    hosts = [
        Host(check_name(name, source.name), check_slots(count, source.name, f"{name} {count}"))
        for name, count in pairs
    ]
    if len(hosts) > 1 and _LAUNCH_NODE.fullmatch(hosts[0].name):
        hosts = hosts[1:]
    return add_up(hosts)


def write_lsf(hosts: Sequence[Host]) -> str:
    """Return $LSB_MCPU_HOSTS."""
    return " ".join(f"{host.name} {host.slots}" for host in hosts) + "\n"


def read_flux(source: HostText) -> list[Host]:
    """Return the hosts of `flux hostlist`, which has no slots."""
    text = source.text.strip()
    names = expand(text, source.name) if text else []
    return [Host(name) for name in dict.fromkeys(names)]


def write_flux(hosts: Sequence[Host]) -> str:
    """Return a host list without slots."""
    return compress([host.name for host in hosts]) + "\n"
