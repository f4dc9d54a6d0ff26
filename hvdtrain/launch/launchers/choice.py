"""The command line of each launcher, and the choice of one: the MPI's or the scheduler's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun
from hvdtrain.launch.launchers.request import (
    Builder,
    LaunchCommand,
    LaunchRequest,
    Site,
    equal_slots,
    has_allocation,
    interface_variables,
    logged,
    total_ranks,
)

_SRUN_BINDINGS = {
    "none": "none",
    "hwthread": "threads",
    "core": "cores",
    "numa": "ldoms",
    "socket": "sockets",
}
_JSRUN_BINDINGS = {"none": "none", "core": "packed:1"}
_PALS_BINDINGS = {
    "none": "none",
    "hwthread": "thread",
    "core": "core",
    "numa": "numa",
    "socket": "socket",
}


def srun(request: LaunchRequest, site: Site) -> LaunchCommand:
    """Return the command line of srun, within a Slurm job."""
    _refuse_timestamps(request, "srun")
    # Open MPI 5 has dropped PMI-2; MPICH and Intel MPI always support it.
    kind = "pmix" if site.vendor == "openmpi" else "pmi2"
    # Otherwise the other ranks would wait for one that has failed.
    flags = [f"--mpi={kind}", "--kill-on-bad-exit=1", "--export=ALL"]
    if request.ranks is not None:
        flags.append(f"--ntasks={request.ranks}")
    if request.hosts:
        names = ",".join(host.name for host in request.hosts)
        flags += [f"--nodelist={names}", f"--nodes={len(request.hosts)}"]
        flags.append(f"--ntasks-per-node={equal_slots(request, 'srun')}")
    elif request.per_node is not None:
        flags.append(f"--ntasks-per-node={request.per_node}")
    # From 22.05 to 23.02 srun does not inherit it from sbatch.
    if threads := site.environ.get("SLURM_CPUS_PER_TASK"):
        flags.append(f"--cpus-per-task={threads}")
    if request.bind is not None:
        flags.append(f"--cpu-bind={_SRUN_BINDINGS[request.bind]}")
    if request.prefix:
        flags.append("--label")
    if request.log_folder is not None:
        flags.append(f"--output={request.log_folder}/rank.%t.log")
    argv = (site.launcher, *flags, *request.program)
    # A comma in a value would end it within --export.
    return LaunchCommand(argv, _settings(request, site), request.log_folder)


def jsrun(request: LaunchRequest, site: Site) -> LaunchCommand:
    """Return the command line of jsrun, within an LSF job: one resource set per host."""
    _refuse_timestamps(request, "jsrun")
    if request.hosts:
        raise UsageError("jsrun gets its hosts from LSF: leave out -hostfile and -H")
    ranks, each = request.ranks, request.per_node
    if ranks is None or each is None or ranks % each:
        raise UsageError("jsrun needs -np N and --per-node K, with N a multiple of K")
    if request.bind not in (None, *_JSRUN_BINDINGS):
        raise UsageError(f"jsrun cannot bind to {request.bind}: use --bind none or core")
    flags = ["-n", str(ranks // each), "-r", "1", "-a", str(each), "-c", "ALL_CPUS"]
    # All ranks of a host see all its GPUs, and each takes that of its local rank.
    flags += ["-g", "ALL_GPUS", "-d", "packed", "-b", _JSRUN_BINDINGS[request.bind or "none"]]
    for name, value in _settings(request, site).items():
        flags += ["-E", f"{name}={value}"]
    if request.prefix:
        flags += ["--stdio_mode", "prepended"]
    program = logged(request.program, request.log_folder, "JSM_NAMESPACE_RANK")
    return LaunchCommand((site.launcher, *flags, *program), {}, request.log_folder)


def pals(request: LaunchRequest, site: Site) -> LaunchCommand:
    """Return the command line of the mpiexec of HPE's PALS."""
    _refuse_timestamps(request, "PALS")
    ranks, each = total_ranks(request, site), request.per_node
    flags = []
    if request.hosts:
        each = equal_slots(request, "PALS")
        ranks = ranks or each * len(request.hosts)
        flags += ["--hosts", ",".join(host.name for host in request.hosts)]
    if ranks is not None:
        flags += ["-n", str(ranks)]
    if each is not None:
        flags += ["--ppn", str(each)]
    flags += ["--cpu-bind", _PALS_BINDINGS[request.bind or "none"]]
    for name, value in _settings(request, site).items():
        flags += ["--env", f"{name}={value}"]
    if request.prefix:
        flags.append("--label")
    program = logged(request.program, request.log_folder, "PALS_RANKID")
    return LaunchCommand((site.launcher, *flags, *program), {}, request.log_folder)


def _settings(request: LaunchRequest, site: Site) -> dict[str, str]:
    """Return the variables to set; all others are inherited in any case."""
    settings = interface_variables(request.interface)
    if request.interface is not None:
        open_mpi = site.vendor not in ("mpich", "intelmpi")
        settings["OMPI_MCA_btl_tcp_if_include" if open_mpi else "FI_TCP_IFACE"] = request.interface
    return settings | {name: value for name, value in request.exports.items() if value is not None}


def _refuse_timestamps(request: LaunchRequest, launcher: str) -> None:
    if request.timestamps:
        raise UsageError(
            f"{launcher} cannot add timestamps to its output: leave out --timestamps, or add '| ts'"
        )


def mpich(request: LaunchRequest, site: Site) -> LaunchCommand:
    """Return the command line of MPICH's mpiexec."""
    hosts = []
    if request.hostfile is None and request.hosts:
        hosts = ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in request.hosts)]
    bind = [] if request.bind is None else ["-bind-to", request.bind]
    rank, time = "[%r] " * request.prefix, "%t " * request.timestamps
    # MPICH prints the seconds since the start.
    output = ["-prepend-pattern", time + rank] if time else ["-l"] if rank else []
    return _mpiexec(request, site, hosts, bind, output)


def intel_mpi(request: LaunchRequest, site: Site) -> LaunchCommand:
    """Return the command line of Intel MPI's mpiexec."""
    if request.timestamps:
        raise UsageError("Intel MPI cannot add timestamps to its output: leave out --timestamps")
    hosts = []
    if request.hostfile is None and request.hosts:
        hosts = ["-hosts", ",".join(host.name for host in request.hosts)]
        if request.per_node is None:
            hosts += ["-ppn", str(equal_slots(request, "Intel MPI"))]
    output = ["-l"] if request.prefix else []
    return _mpiexec(request, site, hosts, _intel_binding(request.bind, site.environ), output)


def _mpiexec(
    request: LaunchRequest, site: Site, hosts: list[str], bind: list[str], output: list[str]
) -> LaunchCommand:
    flags = [] if request.hostfile is None else ["-f", request.hostfile]
    flags += [*hosts, *bind]
    if request.per_node is not None:
        flags += ["-ppn", str(request.per_node)]
    flags += [*_interface(request.interface), *_environment(request), *output]
    if request.log_folder is not None:
        pattern = f"{request.log_folder}/rank.%r.log"
        flags += ["-outfile-pattern", pattern, "-errfile-pattern", pattern]
    ranks = total_ranks(request, site)
    if ranks is not None:
        flags += ["-np", str(ranks)]
    return LaunchCommand((site.launcher, *flags, *request.program), {}, request.log_folder)


def _interface(interface: str | None) -> list[str]:
    if interface is None:
        return []
    if "," in interface:
        raise UsageError(
            f"--interface {interface}: this launcher accepts only one: name one of them"
        )
    return ["-iface", interface]


def _environment(request: LaunchRequest) -> list[str]:
    """Return the flags for the variables to set; all others are inherited in any case."""
    settings: dict[str, str | None] = {**interface_variables(request.interface)}
    if request.interface is not None:
        settings["FI_TCP_IFACE"] = request.interface
    settings |= request.exports
    flags: list[str] = []
    for name, value in settings.items():
        if value is not None:
            flags += ["-genv", name, value]
    return flags


def _intel_binding(bind: str | None, environ: Mapping[str, str]) -> list[str]:
    if bind == "hwthread":
        raise UsageError("Intel MPI cannot do that: use --bind core")
    if bind in (None, "none"):
        # By default it divides the cores between the ranks, whatever threads they have.
        chosen = bind is None and any(name.startswith("I_MPI_PIN") for name in environ)
        return [] if chosen else ["-genv", "I_MPI_PIN", "0"]
    return ["-genv", "I_MPI_PIN_DOMAIN", bind]


# A remote shell does not pass the environment on; what affects results must be equal everywhere.
_FORWARDED = ("HVDTRAIN_", "HOROVOD_", "OMP_NUM_THREADS", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_")


@dataclass(frozen=True)
class _Dialect:
    """The options in which the versions differ."""

    tag: tuple[str, ...]
    time: tuple[str, ...]
    tag_time: tuple[str, ...]
    control: tuple[str, ...]
    socket: str


_4 = _Dialect(
    tag=("--tag-output",),
    time=("--timestamp-output",),
    tag_time=("--tag-output", "--timestamp-output"),
    control=("--mca", "oob_tcp_if_include"),
    socket="socket",
)
_5 = _Dialect(
    tag=("--output", "tag"),
    time=("--output", "timestamp"),
    tag_time=("--output", "tag,timestamp"),
    control=("--prtemca", "prte_if_include"),
    socket="package",
)


def _mpirun(request: LaunchRequest, site: Site, dialect: _Dialect) -> LaunchCommand:
    here = not request.names_hosts and not has_allocation(site.environ)
    flags = [
        *(["--with-ft", "ulfm"] if request.elastic else []),
        # Else ranks that join must not end while others continue, unlike those started here.
        *(["--prtemca", "state_base_recoverable", "1"] if request.elastic else []),
        *_binding(request.bind, here, dialect),
        *_placement(request, here),
        *_open_mpi_interface(request.interface, here, dialect),
        *_exports(request, site.environ),
        *_output(request, dialect),
    ]
    if request.ranks is not None:
        flags += ["-np", str(request.ranks)]
    # Open MPI 5.0.11 loses stderr with its own --output dir=, and 4 makes two files in a folder
    # for each rank.
    program = logged(request.program, request.log_folder, "OMPI_COMM_WORLD_RANK")
    variables = _variables(here, site.environ, site.root)
    return LaunchCommand((site.launcher, *flags, *program), variables, request.log_folder)


open_mpi_4: Builder = partial(_mpirun, dialect=_4)
open_mpi_5: Builder = partial(_mpirun, dialect=_5)


def _binding(bind: str | None, here: bool, dialect: _Dialect) -> list[str]:
    # A rank bound to one core, which is the default, would starve its data loaders.
    word = dialect.socket if bind == "socket" else bind or "none"
    # If there are more ranks than cores they share them, see _placement().
    return ["--bind-to", f"{word}:overload-allowed" if here and word != "none" else word]


def _placement(request: LaunchRequest, here: bool) -> list[str]:
    flags = []
    if here:
        # A slot is a physical core, but two ranks must run on a machine with one, too.
        flags.append("--oversubscribe")
    if request.hostfile is not None:
        flags += ["-hostfile", request.hostfile]
    elif request.hosts:
        named = [f"{host.name}:{request.per_node or host.slots}" for host in request.hosts]
        flags += ["-host", ",".join(named)]
    if request.per_node is not None:
        flags += ["--map-by", f"ppr:{request.per_node}:node"]
    return flags


def _open_mpi_interface(interface: str | None, here: bool, dialect: _Dialect) -> list[str]:
    if interface is None:
        return []
    # On one host the launcher needs no network, and would refuse the loopback.
    control = [] if here else [*dialect.control, interface]
    return ["--mca", "btl_tcp_if_include", interface, *control]


def _exports(request: LaunchRequest, environ: Mapping[str, str]) -> list[str]:
    names = sorted(environ) if request.names_hosts else []
    exports: dict[str, str | None] = {name: None for name in names if name.startswith(_FORWARDED)}
    exports |= interface_variables(request.interface)
    exports |= request.exports
    flags: list[str] = []
    for name, value in exports.items():
        flags += ["-x", name if value is None else f"{name}={value}"]
    return flags


def _output(request: LaunchRequest, dialect: _Dialect) -> tuple[str, ...]:
    if request.prefix:
        return dialect.tag_time if request.timestamps else dialect.tag
    return dialect.time if request.timestamps else ()


def _variables(here: bool, environ: Mapping[str, str], root: bool) -> dict[str, str]:
    variables: dict[str, str] = {}
    if root:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if here:
        # Probing OFI takes a second at the start and is of no use on one host.
        variables |= {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
    return {name: value for name, value in variables.items() if name not in environ}


def mpirun_command(
    mpirun: str,
    vendor: str,
    program: Sequence[str],
    *,
    ranks: int | None,
    environ: Mapping[str, str],
    hostfile: str | None = None,
    root: bool | None = None,
    elastic: bool = False,
) -> LaunchCommand:
    """Return the command line that runs `program` on every rank, by default of this host."""
    build = open_mpi_5 if vendor == "openmpi" else mpich
    request = LaunchRequest(tuple(program), ranks=ranks, hostfile=hostfile, elastic=elastic)
    return build(
        request, Site(mpirun, vendor, environ, os.geteuid() == 0 if root is None else root)
    )


LAUNCHERS = ("mpirun", "srun", "jsrun", "pals")


@dataclass(frozen=True)
class Launcher:
    """A launcher of ranks."""

    name: str
    path: str
    build: Builder


@dataclass(frozen=True)
class _OfScheduler:
    program: str
    job: str
    build: Builder


_OF_SCHEDULERS = {
    "srun": _OfScheduler("srun", "SLURM_JOB_ID", srun),
    "jsrun": _OfScheduler("jsrun", "LSB_JOBID", jsrun),
    "pals": _OfScheduler("mpiexec", "PBS_JOBID", pals),
}


def own_builder(library: MpiLibrary) -> Builder:
    """Return the builder of command lines for the launcher that belongs to an MPI library."""
    if library.vendor == "openmpi":
        return open_mpi_4 if library.major == "4" else open_mpi_5
    return intel_mpi if library.vendor == "intelmpi" else mpich


def choose_launcher(
    name: str | None, library: MpiLibrary, environ: Mapping[str, str], *, missing_ok: bool = False
) -> Launcher:
    """Find the launcher `name`; by default that of the MPI library, else that of the scheduler."""
    if name in _OF_SCHEDULERS:
        found = _of_scheduler(name)
        if found is None and not missing_ok:
            program = _OF_SCHEDULERS[name].program
            raise UsageError(
                f"--launcher {name}: there is no {program} on PATH that belongs to {name}"
            )
        return found or Launcher(name, _OF_SCHEDULERS[name].program, _OF_SCHEDULERS[name].build)
    try:
        return Launcher("mpirun", str(find_mpirun(library)), own_builder(library))
    except UsageError:
        for other, scheduler in _OF_SCHEDULERS.items():
            if name is None and scheduler.job in environ and (found := _of_scheduler(other)):
                return found
        raise


def _of_scheduler(name: str) -> Launcher | None:
    scheduler = _OF_SCHEDULERS[name]
    path = shutil.which(scheduler.program)
    # Every MPI has an mpiexec; that of PALS is in a directory of that name.
    if path is None or (name == "pals" and "pals" not in path):
        return None
    return Launcher(name, path, scheduler.build)
