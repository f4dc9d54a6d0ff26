"""The lists of hosts that schedulers give to a job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hvdtrain.launch.hosts import nodelist
from hvdtrain.launch.hosts.host import (
    Host,
    HostfileError,
    HostText,
    add_up,
    check_name,
    check_slots,
)

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
    names = nodelist.expand(nodes, _NODES[0])
    if not tasks:
        return [Host(name) for name in dict.fromkeys(names)]
    counts = nodelist.expand_counts(tasks, _TASKS[0])
    if len(counts) != len(names):
        mend = f"tells of {len(counts)} hosts, but {_NODES[0]} of {len(names)}"
        raise HostfileError(_TASKS[0], tasks[:80], mend)
    return add_up([Host(*pair) for pair in zip(names, counts, strict=True)])


def write_slurm(hosts: Sequence[Host]) -> str:
    """Return Slurm's two variables."""
    counts = nodelist.compress_counts([host.slots or 1 for host in hosts])
    return f"{_NODES[0]}={nodelist.compress([h.name for h in hosts])}\n{_TASKS[0]}={counts}\n"


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
    names = nodelist.expand(text, source.name) if text else []
    return [Host(name) for name in dict.fromkeys(names)]


def write_flux(hosts: Sequence[Host]) -> str:
    """Return a host list without slots."""
    return nodelist.compress([host.name for host in hosts]) + "\n"
