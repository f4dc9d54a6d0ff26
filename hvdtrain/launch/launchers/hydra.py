"""mpiexec of MPICH and of Intel MPI, which is derived from it."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.request import (
    LaunchCommand,
    LaunchRequest,
    Site,
    equal_slots,
    interface_variables,
    total_ranks,
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
