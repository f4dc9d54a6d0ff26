"""The launchers: one table of how they spell what users ask for, and the choice of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import total_slots
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun
from hvdtrain.launch.launchers.request import (
    BINDINGS,
    LaunchCommand,
    LaunchRequest,
    has_allocation,
)

# A remote shell does not pass the environment on; what affects results must be equal everywhere.
_FORWARDED = ("HVDTRAIN_", "HOROVOD_", "OMP_NUM_THREADS", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_")
_LOGGED = 'mkdir -p "$0" && exec "$@" > "$0/rank.${}.log" 2>&1'
_SAME = dict(zip(BINDINGS, BINDINGS, strict=True))
# Otherwise ranks of Slurm 22.05 leave PMIx_Fence before others have entered it, and MPI_Init of
# Open MPI 5 crashes if a message comes too early.
SLURM_FENCES = ("SLURM_PMIX_FENCE", "ring")
_PIPED = "leave out --timestamps, or add '| ts'"

_Words = tuple[str, ...]
_Environ = Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, and its words for what a request asks for."""

    title: str
    flags: Callable[[Launcher, LaunchRequest, _Environ], list[str]]
    bindings: Mapping[str, str]
    variable: _Words  # sets one for the ranks
    label: _Words  # lines of output begin with their rank
    time: _Words = ()  # with a time
    label_time: _Words = ()  # with both
    no_time: str = _PIPED
    rank: str = ""  # variable with a rank's number, where the launcher writes no file for each
    control: _Words = ()  # chooses the network of the launcher itself
    variables: Callable[[Launcher, LaunchRequest, _Environ], dict[str, str]] | None = None
    name: str = "mpirun"
    program: str = ""  # of a scheduler
    job: str = ""  # variable that its jobs have
    path: str = ""
    vendor: str = ""

    def command(self, request: LaunchRequest, environ: _Environ) -> LaunchCommand:
        """Return the command that starts what is asked for."""
        if request.timestamps and not self.time:
            raise UsageError(f"{self.title} cannot add timestamps to its output: {self.no_time}")
        flags = self.flags(self, request, environ)
        program, folder = request.program, request.log_folder
        if folder is not None and self.rank:
            program = ("sh", "-c", _LOGGED.format(self.rank), folder, *program)
        variables = {} if self.variables is None else self.variables(self, request, environ)
        return LaunchCommand((self.path, *flags, *program), variables, folder)

    def output(self, request: LaunchRequest) -> _Words:
        """Return the words for what lines of output begin with."""
        if request.timestamps:
            return self.label_time if request.prefix else self.time
        return self.label if request.prefix else ()

    def settings(self, request: LaunchRequest) -> list[str]:
        """Return the words that set variables; all others are inherited in any case."""
        pairs = _settings(self, request).items()
        return [word.format(name, value) for name, value in pairs for word in self.variable]


def _settings(launcher: Launcher, request: LaunchRequest) -> dict[str, str]:
    settings: dict[str, str | None] = {**_networks(request)}
    if request.interface is not None:
        fabric = launcher.vendor in ("mpich", "intelmpi")
        name = "FI_TCP_IFACE" if fabric else "OMPI_MCA_btl_tcp_if_include"
        settings[name] = request.interface
    settings |= request.exports
    return {name: value for name, value in settings.items() if value is not None}


def _networks(request: LaunchRequest) -> dict[str, str]:
    """Return the variables that choose the network of NCCL and Gloo."""
    if request.interface is None:
        return {}
    return dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), request.interface)


def _total_ranks(request: LaunchRequest, environ: _Environ) -> int | None:
    """Return the number of ranks, for launchers that do not count; None for one per slot."""
    if request.ranks is not None or request.per_node is None:
        return request.ranks
    if not request.hosts and has_allocation(environ):
        raise UsageError(f"--per-node {request.per_node} on how many hosts? Also pass -np N")
    return request.per_node * max(1, len(request.hosts))


def _equal_slots(launcher: Launcher, request: LaunchRequest) -> int:
    """Return the number of ranks on each host, for a launcher that takes one number for all."""
    if request.per_node is not None:
        return request.per_node
    (first, *others) = {host.slots for host in request.hosts}
    if first is None or None in others:
        raise UsageError(
            f"{launcher.title} does not know how many ranks each host gets: pass --per-node N"
        )
    if others:
        raise UsageError(
            f"{launcher.title} takes the same number of ranks on every host, not "
            f"{total_slots(request.hosts)} in unequal parts: give all hosts the same number of "
            "slots, or pass --per-node N"
        )
    return first


def _srun(self: Launcher, request: LaunchRequest, environ: _Environ) -> list[str]:
    # Open MPI 5 has dropped PMI-2; MPICH and Intel MPI always support it.
    kind = "pmix" if self.vendor == "openmpi" else "pmi2"
    # Otherwise the other ranks would wait for one that has failed. A comma in a variable's value
    # would end it within --export.
    flags = [f"--mpi={kind}", "--kill-on-bad-exit=1", "--export=ALL"]
    if request.ranks is not None:
        flags.append(f"--ntasks={request.ranks}")
    each = request.per_node
    if request.hosts:
        names = ",".join(host.name for host in request.hosts)
        flags += [f"--nodelist={names}", f"--nodes={len(request.hosts)}"]
        each = _equal_slots(self, request)
    if each is not None:
        flags.append(f"--ntasks-per-node={each}")
    # From 22.05 to 23.02 srun does not inherit it from sbatch.
    if threads := environ.get("SLURM_CPUS_PER_TASK"):
        flags.append(f"--cpus-per-task={threads}")
    if request.bind is not None:
        flags.append(f"--cpu-bind={self.bindings[request.bind]}")
    flags += self.output(request)
    if request.log_folder is not None:
        flags.append(f"--output={request.log_folder}/rank.%t.log")
    return flags


def _srun_variables(self: Launcher, request: LaunchRequest, environ: _Environ) -> dict[str, str]:
    name, value = SLURM_FENCES
    fences = {name: environ.get(name) or value} if self.vendor == "openmpi" else {}
    return fences | _settings(self, request)


def _jsrun(self: Launcher, request: LaunchRequest, environ: _Environ) -> list[str]:
    """Return one resource set per host."""
    if request.hosts:
        raise UsageError("jsrun gets its hosts from LSF: leave out -hostfile and -H")
    ranks, each = request.ranks, request.per_node
    if ranks is None or each is None or ranks % each:
        raise UsageError("jsrun needs -np N and --per-node K, with N a multiple of K")
    bind = self.bindings.get(request.bind or "none")
    if bind is None:
        raise UsageError(f"jsrun cannot bind to {request.bind}: use --bind none or core")
    flags = ["-n", str(ranks // each), "-r", "1", "-a", str(each), "-c", "ALL_CPUS"]
    # All ranks of a host see all its GPUs, and each takes that of its local rank.
    flags += ["-g", "ALL_GPUS", "-d", "packed", "-b", bind]
    return [*flags, *self.settings(request), *self.output(request)]


def _pals(self: Launcher, request: LaunchRequest, environ: _Environ) -> list[str]:
    ranks, each, flags = _total_ranks(request, environ), request.per_node, []
    if request.hosts:
        each = _equal_slots(self, request)
        ranks = ranks or each * len(request.hosts)
        flags += ["--hosts", ",".join(host.name for host in request.hosts)]
    if ranks is not None:
        flags += ["-n", str(ranks)]
    if each is not None:
        flags += ["--ppn", str(each)]
    flags += ["--cpu-bind", self.bindings[request.bind or "none"]]
    return [*flags, *self.settings(request), *self.output(request)]


def _mpich(self: Launcher, request: LaunchRequest, environ: _Environ) -> list[str]:
    named = ",".join(f"{host.name}:{host.slots}" for host in request.hosts)
    hosts = ["-hosts", named] if named and request.hostfile is None else []
    bind = [] if request.bind is None else ["-bind-to", self.bindings[request.bind]]
    return _hydra(self, request, environ, [*hosts, *bind])


def _intel_mpi(self: Launcher, request: LaunchRequest, environ: _Environ) -> list[str]:
    flags = []
    if request.hostfile is None and request.hosts:
        flags = ["-hosts", ",".join(host.name for host in request.hosts)]
        if request.per_node is None:
            flags += ["-ppn", str(_equal_slots(self, request))]
    bind = request.bind
    if bind == "hwthread":
        raise UsageError("Intel MPI cannot do that: use --bind core")
    # By default it divides the cores between the ranks, whatever threads they have.
    if bind == "none" or (bind is None and not any(n.startswith("I_MPI_PIN") for n in environ)):
        flags += ["-genv", "I_MPI_PIN", "0"]
    elif bind is not None:
        flags += ["-genv", "I_MPI_PIN_DOMAIN", self.bindings[bind]]
    return _hydra(self, request, environ, flags)


def _hydra(
    self: Launcher, request: LaunchRequest, environ: _Environ, own: Sequence[str]
) -> list[str]:
    flags = [] if request.hostfile is None else ["-f", request.hostfile]
    flags += own
    if request.per_node is not None:
        flags += ["-ppn", str(request.per_node)]
    if request.interface is not None:
        if "," in request.interface:
            raise UsageError(
                f"--interface {request.interface}: this launcher accepts only one: name one of them"
            )
        flags += ["-iface", request.interface]
    flags += [*self.settings(request), *self.output(request)]
    if request.log_folder is not None:
        pattern = f"{request.log_folder}/rank.%r.log"
        flags += ["-outfile-pattern", pattern, "-errfile-pattern", pattern]
    ranks = _total_ranks(request, environ)
    return flags if ranks is None else [*flags, "-np", str(ranks)]


def _is_here(request: LaunchRequest, environ: _Environ) -> bool:
    return not request.names_hosts and not has_allocation(environ)


def _open_mpi(self: Launcher, request: LaunchRequest, environ: _Environ) -> list[str]:
    here, each = _is_here(request, environ), request.per_node
    flags = []
    if request.elastic:
        # Else ranks that join must not end while others continue, unlike those started here.
        flags += ["--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1"]
    # A rank bound to one core, which is the default, would starve its data loaders.
    bind = self.bindings[request.bind or "none"]
    flags += ["--bind-to", f"{bind}:overload-allowed" if here and bind != "none" else bind]
    if here:
        # A slot is a physical core, but two ranks must run on a machine with one, too.
        flags.append("--oversubscribe")
    if request.hostfile is not None:
        flags += ["-hostfile", request.hostfile]
    elif request.hosts:
        flags += ["-host", ",".join(f"{host.name}:{each or host.slots}" for host in request.hosts)]
    if each is not None:
        flags += ["--map-by", f"ppr:{each}:node"]
    if request.interface is not None:
        flags += ["--mca", "btl_tcp_if_include", request.interface]
        # On one host the launcher needs no network, and would refuse the loopback.
        flags += [] if here else [*self.control, request.interface]
    names = sorted(environ) if request.names_hosts else []
    exports: dict[str, str | None] = {name: None for name in names if name.startswith(_FORWARDED)}
    for name, value in (exports | _networks(request) | dict(request.exports)).items():
        flags += ["-x", name if value is None else f"{name}={value}"]
    flags += self.output(request)
    return flags if request.ranks is None else [*flags, "-np", str(request.ranks)]


def _open_mpi_variables(
    self: Launcher, request: LaunchRequest, environ: _Environ
) -> dict[str, str]:
    variables: dict[str, str] = {}
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if _is_here(request, environ):
        # Probing OFI takes a second at the start and is of no use on one host.
        variables |= {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
    return {name: value for name, value in variables.items() if name not in environ}


_OPEN_MPI_5 = Launcher(
    "Open MPI",
    _open_mpi,
    bindings={**_SAME, "socket": "package"},
    variable=("-x", "{}={}"),
    label=("--output", "tag"),
    time=("--output", "timestamp"),
    label_time=("--output", "tag,timestamp"),
    # Open MPI 5.0.11 loses stderr with its own --output dir=, and 4 makes two files in a folder
    # for each rank.
    rank="OMPI_COMM_WORLD_RANK",
    control=("--prtemca", "prte_if_include"),
    variables=_open_mpi_variables,
)
_MPICH = Launcher(
    "MPICH",
    _mpich,
    bindings=_SAME,
    variable=("-genv", "{0}", "{1}"),
    label=("-l",),
    # MPICH prints the seconds since the start.
    time=("-prepend-pattern", "%t "),
    label_time=("-prepend-pattern", "%t [%r] "),
)
LAUNCHERS: Mapping[str, Launcher] = {
    "openmpi": _OPEN_MPI_5,
    "openmpi 4": replace(
        _OPEN_MPI_5,
        bindings=_SAME,
        label=("--tag-output",),
        time=("--timestamp-output",),
        label_time=("--tag-output", "--timestamp-output"),
        control=("--mca", "oob_tcp_if_include"),
    ),
    "mpich": _MPICH,
    "intelmpi": replace(
        _MPICH,
        title="Intel MPI",
        flags=_intel_mpi,
        time=(),
        no_time="leave out --timestamps",
    ),
    "srun": Launcher(
        "srun",
        _srun,
        bindings={
            "none": "none",
            "hwthread": "threads",
            "core": "cores",
            "numa": "ldoms",
            "socket": "sockets",
        },
        variable=(),
        label=("--label",),
        variables=_srun_variables,
        name="srun",
        program="srun",
        job="SLURM_JOB_ID",
    ),
    "jsrun": Launcher(
        "jsrun",
        _jsrun,
        bindings={"none": "none", "core": "packed:1"},
        variable=("-E", "{}={}"),
        label=("--stdio_mode", "prepended"),
        rank="JSM_NAMESPACE_RANK",
        name="jsrun",
        program="jsrun",
        job="LSB_JOBID",
    ),
    "pals": Launcher(
        "PALS",
        _pals,
        bindings={**_SAME, "hwthread": "thread"},
        variable=("--env", "{}={}"),
        label=("--label",),
        rank="PALS_RANKID",
        name="pals",
        program="mpiexec",
        job="PBS_JOBID",
    ),
}
_OF_SCHEDULERS = {name: one for name, one in LAUNCHERS.items() if one.job}
NAMES = ("mpirun", *_OF_SCHEDULERS)


def own_launcher(library: MpiLibrary, path: str) -> Launcher:
    """Return the launcher of an MPI library, at a path."""
    kind = library.vendor if library.vendor in LAUNCHERS else "mpich"
    if library.vendor == "openmpi" and library.major == "4":
        kind = "openmpi 4"
    return replace(LAUNCHERS[kind], path=path, vendor=library.vendor)


def choose_launcher(
    name: str | None, library: MpiLibrary, environ: _Environ, *, missing_ok: bool = False
) -> Launcher:
    """Find the launcher `name`; by default that of the MPI library, else that of the scheduler."""
    if name in _OF_SCHEDULERS:
        program = _OF_SCHEDULERS[name].program
        path = _find(name) or (program if missing_ok else None)
        if path is None:
            raise UsageError(
                f"--launcher {name}: there is no {program} on PATH that belongs to {name}"
            )
        return replace(_OF_SCHEDULERS[name], path=path, vendor=library.vendor)
    try:
        return own_launcher(library, str(find_mpirun(library)))
    except UsageError:
        for other, launcher in _OF_SCHEDULERS.items():
            if name is None and launcher.job in environ and (path := _find(other)):
                return replace(launcher, path=path, vendor=library.vendor)
        raise


def _find(name: str) -> str | None:
    """Return the path of a scheduler's launcher."""
    path = shutil.which(_OF_SCHEDULERS[name].program)
    # Every MPI has an mpiexec; that of PALS is in a directory of that name.
    return path if path is None or name != "pals" or "pals" in path else None
