"""The hosts of a job that still answer, and a request for ranks on these alone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.request import LaunchRequest

# Starts a program for a request, with its output discarded.
Starter = Callable[[LaunchRequest], "subprocess.Popen[bytes]"]

# The mpirun of Open MPI 5.0.11 at times never ends if its program ends at once: on two busy cores
# in 13 of 90 restarts with `true`, in none of 64 with this.
_TRIAL = ("sleep", "0.5")
_TRIAL_SECONDS = (5.0, 20.0)
_PERIOD_SECONDS = 0.05


def answering(request: LaunchRequest, start: Starter, folder: Path) -> tuple[Host, ...]:
    """Return the hosts of a request on which the launcher can start a program."""
    answers = set[Host]()
    tried = request.hosts
    for seconds in _TRIAL_SECONDS:
        trials = {host: start(_trial(request, host, folder)) for host in tried}
        deadline = time.monotonic() + seconds
        while any(trial.poll() is None for trial in trials.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(_PERIOD_SECONDS)
        answers |= {host for host, trial in trials.items() if trial.poll() == 0}
        tried = tuple(host for host, trial in trials.items() if trial.poll() is None)
        for host in tried:
            trials[host].kill()
            trials[host].wait()
    return tuple(host for host in request.hosts if host in answers)


def _trial(request: LaunchRequest, host: Host, folder: Path) -> LaunchRequest:
    alone = replace(request, program=_TRIAL, ranks=1, per_node=None, exports={})
    alone = replace(alone, elastic=False, log_folder=None)
    file = folder / f"trial.{request.hosts.index(host)}"
    return replace(on_hosts(alone, (host,), file), ranks=1)


def on_hosts(request: LaunchRequest, hosts: Sequence[Host], file: Path) -> LaunchRequest:
    """Return a request for ranks on some of its hosts, as many as these have slots for."""
    ranks = request.ranks
    if ranks is not None and len(hosts) < len(request.hosts):
        each = request.per_node
        slots = [host.slots if each is None else each for host in hosts]
        known = [count for count in slots if count is not None]
        share = ranks * len(hosts) // len(request.hosts)
        ranks = min(ranks, sum(known) if len(known) == len(slots) else share)
    changed = replace(request, ranks=ranks, hosts=tuple(hosts))
    if request.hostfile is None:
        return changed
    file.write_text("".join(map(_line, hosts)), encoding="ascii")
    return replace(changed, hostfile=str(file))


def _line(host: Host) -> str:
    name = f"{host.user}@{host.name}" if host.user else host.name
    slots = [] if host.slots is None else [f"slots={host.slots}"]
    return " ".join([name, *slots, *host.others]) + "\n"
