"""The ranks to start, and the command line that starts them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.launch.hosts.host import Host

BINDINGS = ("none", "hwthread", "core", "numa", "socket")

# If one of these is set, a launcher asks the scheduler for hosts, without any hostfile.
_ALLOCATIONS = (
    *("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "FLUX_URI"),
    "OAR_NODEFILE",
)


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
