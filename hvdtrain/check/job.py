"""`hvdtrain check --job`: try all nodes of a job at once, and say what would fail, or is odd."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median_low
from typing import Any

from hvdtrain.check.checks import TOO_FEW, Section
from hvdtrain.check.probe import ProbeError, finish
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.formats import compress
from hvdtrain.launch.launchers.choice import choose_launcher
from hvdtrain.launch.launchers.mpi_library import loaded_library
from hvdtrain.launch.launchers.options import hosts_of_job, with_hosts
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.launch.remote_shell import require_reachable
from hvdtrain.topology import RankCores, binding_warnings, shortened

Ranks = Mapping[int, Mapping[str, Any]]
# Whether a job would fail, why and what to do, and on which hosts, unless the text says it.
Finding = tuple[bool, str, list[str]]

_AHEAD_SECONDS, _SLOW, _MOST = 1.0, 10, 8
_END_SECONDS = 7  # of the time for all
# What nodes should have alike, whether ranks would fail else, and what to do.
_ALIKE = (
    ("versions", True, "use one environment on all nodes, as with run --stage-env"),
    ("machine", False, "the slowest decides: ask for nodes of one kind"),
)


def check_job(request: LaunchRequest, seconds: float) -> Section:
    """Start ranks on each host of a request or an allocation, and return what they find."""
    library, each, left = loaded_library(), request.per_node or 1, seconds - _END_SECONDS
    launcher = choose_launcher(None, library, os.environ)
    named = with_hosts(request, launcher, os.environ).hosts or hosts_of_job(os.environ, request)
    hosts = list(dict.fromkeys(host.name for host in named)) or [socket.gethostname()]
    asked = os.environ.get("SLURM_NTASKS_PER_NODE", "") if request.per_node is None else str(each)
    program = (sys.executable, "-m", "hvdtrain.check.node", str(left / 2), asked)
    request = replace(request, program=program, ranks=len(hosts) * each, per_node=each)
    request = with_hosts(request, launcher, os.environ)
    try:
        if launcher.name == "mpirun":
            require_reachable(request, os.environ)
    except UsageError as error:
        return Section("nodes", {"hosts": hosts}, [_names(hosts)], [str(error)])
    line = launcher.command(request, os.environ)
    try:
        done = finish(line.argv, left, line.variables)
        said, ending = done.stdout, f"{done.ending}: {done.complaint}" * (done.returncode != 0)
    except ProbeError as error:
        said, ending = error.said, str(error)
    ranks = read_ranks(said)
    problems, remarks = judge_job(ranks, hosts, each, ending)
    lines = [f"{_names(hosts)}; {len(ranks)} of {len(hosts) * each} ranks have started"]
    if pairs := sorted(_latencies(ranks).values()):
        lines.append(f"messages between nodes: {median_low(pairs):.0f} us, at most {pairs[-1]:.0f}")
    facts = {"hosts": hosts, "ranks": ranks, "remarks": remarks}
    return Section("nodes", facts, [*lines, *(remarks or ["no remarks"])], problems)


def read_ranks(text: str) -> dict[int, dict[str, Any]]:
    """Return what ranks have printed as JSON, among lines of the launcher, which may join them."""
    ranks: dict[int, dict[str, Any]] = defaultdict(dict)
    for found in re.finditer('{"rank"', text):
        with suppress(ValueError):
            said, _ = json.JSONDecoder().raw_decode(text, found.start())
            ranks[said["rank"]] |= said
    return {rank: ranks[rank] for rank in sorted(ranks) if "host" in ranks[rank]}


def judge_job(
    ranks: Ranks, hosts: Sequence[str], each: int, ending: str
) -> tuple[list[str], list[str]]:
    """Return what fails in a job of `each` ranks on each host, and other remarks (pure)."""
    said: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for find in (_unlike, _links, _own_faults, _places):
        for fails, text, those in find(ranks):
            said[fails, text] += those
    lost = _lost(ranks, hosts, each, ending)
    found: dict[bool, list[str]] = {True: [lost] if lost else [], False: []}
    for (fails, text), those in said.items():
        found[fails].append(f"{_names(those)}: {text}" if those else text)
    for texts in found.values():
        if len(texts) > _MOST:
            texts[_MOST:] = [f"{len(texts) - _MOST} more, which --json shows"]
    return found[True], found[False]


def _lost(ranks: Ranks, hosts: Sequence[str], each: int, ending: str) -> str:
    here = {facts["host"].partition(".")[0] for facts in ranks.values()}
    silent = [host for host in hosts if host.partition(".")[0] not in here]
    missing = [rank for rank in range(len(hosts) * each) if rank not in ranks]
    if len(silent) * each != len(missing):  # their hosts have other ranks, too
        silent = [hosts[rank // each] for rank in missing]
    failed = [
        f"{facts['host']}: {facts['failed']}" for facts in ranks.values() if "failed" in facts
    ]
    if failed:
        return f"{_some(failed)}: mend it there, as `check` on that node says"
    sizes = {facts["size"] for facts in ranks.values() if "size" in facts}
    if sizes - {len(hosts) * each}:
        found = _some(sorted(map(str, sizes)))
        return f"ranks formed worlds of {found}: start them with the launcher of their MPI"
    unfinished: dict[int, Any] = {
        rank: ranks[rank].get("waits_for") for rank in ranks if "size" not in ranks[rank]
    }
    if set(unfinished.values()) != {None}:  # others wait for those that do not even say so
        silent += [ranks[rank]["host"] for rank, peer in unfinished.items() if peer is None]
    if silent:
        return f"{_names(silent)}: no answer ({ending}): log in and try Python there"
    texts = [
        f"{ranks[rank]['host']} to {ranks.get(peer, {}).get('host', 'the others')}"
        for rank, peer in unfinished.items()
    ]
    remedy = "see whether a firewall is between"
    if texts:
        return f"MPI does not connect {_some(texts)} ({ending}): {remedy}"
    return f"ranks did not end ({ending}): see what they print, with `run`" if ending else ""


def _unlike(ranks: Ranks) -> Iterator[Finding]:
    for kind, fails, remedy in _ALIKE:
        for name in next(iter(ranks.values()), {}).get(kind, ()):
            found = defaultdict(list)
            for facts in ranks.values():
                found[facts[kind].get(name)].append(facts["host"])
            if len(found) > 1:
                texts = [f"{value} on {_names(those)}" for value, those in found.items()]
                yield fails, f"{name}: {_some(texts)}: {remedy}", []


def _latencies(ranks: Ranks) -> dict[tuple[str, str], float]:
    """Return the microseconds of a message between the hosts of a pair."""
    return {
        (facts["host"], ranks[peer]["host"]): taken
        for facts in ranks.values()
        for peer, taken, _ in facts.get("messages", ())
        if peer in ranks and ranks[peer]["host"] != facts["host"]
    }


def _links(ranks: Ranks) -> Iterator[Finding]:
    cores = defaultdict[str, list[frozenset[int]]](list)
    for facts in ranks.values():
        cores[facts["host"]].append(_cores(facts["bound_to"]))
    # There a rank that is sent a message may first have to wait for a core.
    crowded = {host for host, each in cores.items() if len(each) > len(frozenset().union(*each))}
    pairs = [each for each in _latencies(ranks).items() if crowded.isdisjoint(each[0])]
    pairs.sort(key=lambda pair: -pair[1])
    usual = pairs[-1 - len(pairs) // 4][1] if pairs else 0.0  # few pairs have the slow node
    slow = [f"{a} to {b} {taken:.0f} us" for (a, b), taken in pairs if taken > _SLOW * usual]
    if slow:
        remedy = "leave out the node that is in all"
        yield False, f"slow: {_some(slow)}, others {usual:.0f} us: {remedy}", []
    clocks = {ranks[r]["host"]: s for r, _, s in ranks.get(0, {}).get("messages", ()) if r in ranks}
    usual = median_low([0.0, *clocks.values()])
    clocks |= {ranks[0]["host"]: 0.0} if clocks else {}
    off = [
        f"{host} {s - usual:+.1f} s"
        for host, s in clocks.items()
        if abs(s - usual) > _AHEAD_SECONDS
    ]
    if off:
        yield False, f"clocks: {_some(off)}: logs mislead; have the site start chronyd", []


def _own_faults(ranks: Ranks) -> Iterator[Finding]:
    for facts in ranks.values():
        host = [facts["host"]]
        yield from ((False, text, host) for text in facts["advice"])
        if facts.get("no_shared_memory"):
            yield False, f"ranks use MPI, which is slower: {facts['no_shared_memory']}", host
        if facts.get("level", "multiple") != "multiple":
            yield False, f"threads of MPI: {facts['level']}{TOO_FEW}", host
        tcp = facts.get("tcp", {})
        fails = all(tcp.values())
        for name, reason in tcp.items():
            if reason is None:
                yield False, f"the next node has no address on {name}: name an --interface", host
            elif reason:
                text = f"the next node is not reached on {name} ({reason}): open its ports, or "
                yield fails, f"{text}name another --interface", host


def _places(ranks: Ranks) -> Iterator[Finding]:
    hosts: dict[str, list[RankCores]] = defaultdict(list)
    for rank, facts in ranks.items():
        host, cores, gpus = facts["host"], _cores(facts["bound_to"]), facts["near_gpus"]
        local = len(hosts[host])
        hosts[host].append(RankCores(rank, cores, facts["threads"]))
        if local < len(gpus) and cores.isdisjoint(_cores(gpus[local])):
            text = f"local rank {local} is bound to none of the cores near its GPU, {gpus[local]}: "
            yield False, f"{text}bind it to them, or to none", [host]
    for host, those in hosts.items():
        there = ranks[those[0].rank]["machine"]["cores"]
        yield from ((False, text, []) for text in binding_warnings(host, those, there))


def _cores(text: str) -> frozenset[int]:
    """Return the numbers in a list of Linux, as in 0-3,8."""
    parts = [part.split("-") for part in text.split(",") if part]
    return frozenset(n for part in parts for n in range(int(part[0]), int(part[-1]) + 1))


def _some(texts: Sequence[str]) -> str:
    return shortened(texts, ", ", "")


def _names(hosts: Iterable[str]) -> str:
    """Return hosts as ranges, at most eight, in their order."""
    return _some(compress(list(dict.fromkeys(hosts))).split(","))
