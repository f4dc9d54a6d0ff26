"""The ranks to start, and the command line that starts them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import Host, total_slots

BINDINGS = ("none", "hwthread", "core", "numa", "socket")

# If one of these is set, a launcher asks the scheduler for hosts, without any hostfile.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "FLUX_URI")


@dataclass(frozen=True)
class LaunchRequest:
    """The ranks that a user wants to start."""

    program: tuple[str, ...]
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    hostfile: str | None = None
    per_node: int | None = None
    exports: Mapping[str, str | None] = field(default_factory=dict)
    interface: str | None = None
    bind: str | None = None
    log_folder: str | None = None
    prefix: bool = False
    timestamps: bool = False
    elastic: bool = False

    @property
    def names_hosts(self) -> bool:
        """Whether the user names hosts, so that ranks may run elsewhere without a scheduler."""
        return bool(self.hosts) or self.hostfile is not None


@dataclass(frozen=True)
class Site:
    """The launcher, and the environment in which it runs."""

    launcher: str
    vendor: str
    environ: Mapping[str, str]
    root: bool = False


@dataclass(frozen=True)
class LaunchCommand:
    """A command that starts ranks."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None

    def shell(self) -> str:
        """Return the command as one line to paste into a shell."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        line = shlex.join([*(["env", *settings] if settings else []), *self.argv])
        return f"mkdir -p {shlex.quote(self.folder)} && {line}" if self.folder else line


Builder = Callable[[LaunchRequest, Site], LaunchCommand]


def has_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler has given hosts to this job."""
    return any(name in environ for name in _ALLOCATIONS)


def without_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without a scheduler's allocation, so that ranks start on this host."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _ALLOCATIONS and not name.startswith("SLURM_")
    }


def total_ranks(request: LaunchRequest, site: Site) -> int | None:
    """Return the number of ranks, for launchers that do not count; None for one per slot."""
    if request.ranks is not None or request.per_node is None:
        return request.ranks
    if not request.hosts and has_allocation(site.environ):
        raise UsageError(f"--per-node {request.per_node} on how many hosts? Also pass -np N")
    return request.per_node * max(1, len(request.hosts))


def equal_slots(request: LaunchRequest, launcher: str) -> int:
    """Return the number of ranks on each host, for a launcher that takes one number for all."""
    if request.per_node is not None:
        return request.per_node
    slots = {host.slots for host in request.hosts}
    (first, *others) = slots
    if first is None or None in others:
        raise UsageError(
            f"{launcher} does not know how many ranks each host gets: pass --per-node N"
        )
    if others:
        total = total_slots(request.hosts)
        raise UsageError(
            f"{launcher} takes the same number of ranks on every host, not {total} in unequal "
            "parts: give all hosts the same number of slots, or pass --per-node N"
        )
    return first


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables that choose the network of NCCL and Gloo."""
    if interface is None:
        return {}
    return {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}


def logged(program: tuple[str, ...], folder: str | None, rank: str) -> tuple[str, ...]:
    """Return a program that writes its output to a file, where the launcher cannot per rank."""
    if folder is None:
        return program
    script = f'mkdir -p "$0" && exec "$@" > "$0/rank.${rank}.log" 2>&1'
    return ("sh", "-c", script, folder, *program)
