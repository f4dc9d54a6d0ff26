"""The launchers of schedulers: srun of Slurm, jsrun of LSF, mpiexec of PALS."""

from __future__ import annotations

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.request import (
    LaunchCommand,
    LaunchRequest,
    Site,
    equal_slots,
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
