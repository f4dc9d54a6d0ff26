"""What is to be started, where, and the command line that does it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import Host, total_slots

__all__ = [
    "BINDINGS",
    "Builder",
    "LaunchCommand",
    "LaunchRequest",
    "Site",
    "equal_slots",
    "has_allocation",
    "interface_variables",
    "logged",
    "total_ranks",
    "without_allocation",
]

BINDINGS = ("none", "hwthread", "core", "numa", "socket")

# Where one of these is set a launcher asks the scheduler for hosts, without any hostfile.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "FLUX_URI")


@dataclass(frozen=True)
class LaunchRequest:
    """What a person wants to have started.

    Attributes:
        program: command and arguments of a rank.
        ranks: how many; None is one for each slot.
        hosts: on which; none is this host, or what the scheduler has given.
        hostfile: the file that names `hosts`, in the launcher's own grammar; None: they were named
            in the command line.
        per_node: ranks on each host; None is up to the slots.
        exports: environment variables for the ranks; a value of None is that of this environment.
        interface: the network interface to use, or several with commas between them.
        bind: of BINDINGS; None is what suits a rank that has threads.
        log_folder: where each rank writes rank.N.log; None is the launcher's own output.
        prefix: whether each line of output begins with its rank.
        timestamps: whether each line of output begins with a time.
    """

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

    @property
    def names_hosts(self) -> bool:
        """Whether the ranks may be on other hosts than this one, without any scheduler."""
        return bool(self.hosts) or self.hostfile is not None


@dataclass(frozen=True)
class Site:
    """Where it is started.

    Attributes:
        launcher: path or name of the launcher.
        vendor: of the MPI library of the ranks: "openmpi", "mpich", "intelmpi" or another's name.
        environ: the environment in which the launcher will run.
        root: whether the user is root, which Open MPI refuses unless told.
    """

    launcher: str
    vendor: str
    environ: Mapping[str, str]
    root: bool = False


@dataclass(frozen=True)
class LaunchCommand:
    """A command line, the variables to set beside the inherited ones, a folder that must exist."""

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None

    def shell(self) -> str:
        """Return it as one line to paste into a shell."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        line = shlex.join([*(["env", *settings] if settings else []), *self.argv])
        return f"mkdir -p {shlex.quote(self.folder)} && {line}" if self.folder else line


Builder = Callable[[LaunchRequest, Site], LaunchCommand]


def has_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether a scheduler has given hosts."""
    return any(name in environ for name in _ALLOCATIONS)


def without_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which ranks start here, whatever hosts a scheduler has given."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _ALLOCATIONS and not name.startswith("SLURM_")
    }


def total_ranks(request: LaunchRequest, site: Site) -> int | None:
    """Return how many ranks, for launchers that do not count themselves; None is for each slot.

    Raises:
        UsageError: that depends on how many hosts a scheduler has given.
    """
    if request.ranks is not None or request.per_node is None:
        return request.ranks
    if not request.hosts and has_allocation(site.environ):
        raise UsageError(f"--per-node {request.per_node} on how many hosts? Say -np N, too")
    return request.per_node * max(1, len(request.hosts))


def equal_slots(request: LaunchRequest, launcher: str) -> int:
    """Return how many ranks each host gets, where a launcher takes one number for all.

    Raises:
        UsageError: hosts have different numbers of slots.
    """
    if request.per_node is not None:
        return request.per_node
    slots = {host.slots for host in request.hosts}
    (first, *others) = slots
    if first is None or None in others:
        raise UsageError(f"{launcher} is not told how many ranks a host gets: say --per-node N")
    if others:
        total = total_slots(request.hosts)
        raise UsageError(
            f"{launcher} takes one number of ranks for all hosts, not {total} in unequal parts: "
            "give all hosts as many slots, or say --per-node N"
        )
    return first


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return what tells the other libraries that move gradients which network to use."""
    if interface is None:
        return {}
    return {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}


def logged(program: tuple[str, ...], folder: str | None, rank: str) -> tuple[str, ...]:
    """Have a rank write its output into a file, where its launcher cannot do so in one file.

    Args:
        program: command and arguments of a rank.
        folder: where to; None leaves the program as it is.
        rank: the variable that tells a process its rank.
    """
    if folder is None:
        return program
    script = f'mkdir -p "$0" && exec "$@" > "$0/rank.${rank}.log" 2>&1'
    return ("sh", "-c", script, folder, *program)
