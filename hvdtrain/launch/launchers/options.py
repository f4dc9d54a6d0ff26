"""The options of `run`, parsed and checked."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.check import require_slots
from hvdtrain.launch.hosts.formats import (
    FORMATS,
    guess_format,
    read_file,
    read_hostfile,
    source_of_job,
)
from hvdtrain.launch.hosts.host import Host, HostfileError, HostText
from hvdtrain.launch.launchers.choice import Launcher
from hvdtrain.launch.launchers.request import LaunchRequest, has_allocation

_EXPORT = re.compile(r"([A-Za-z_]\w*)(?:=(.*))?", re.DOTALL | re.ASCII)
# Open MPI's wheel is built without these schedulers, and would start all ranks on this host.
_UNKNOWN_TO_OPEN_MPI = {"PE_HOSTFILE": "sge", "LSB_JOBID": "lsf", "FLUX_URI": "flux"}
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


def check_interface(interface: str | None) -> None:
    """Check that this host has the network interfaces of --interface."""
    if interface is None:
        return
    here = [name for _, name in socket.if_nameindex()]
    for name in interface.split(","):
        if name not in here:
            raise UsageError(f"--interface {name}: this host has {', '.join(here)}")


def with_hosts(
    request: LaunchRequest, launcher: Launcher, vendor: str, environ: Mapping[str, str]
) -> LaunchRequest:
    """Return the request with the hosts of its hostfile, or of a job unknown to the launcher."""
    hosts = request.hosts
    if request.hostfile is not None:
        hosts = tuple(_hosts_of(request.hostfile, launcher, vendor))
    own = launcher.name == "mpirun"
    if own and vendor == "openmpi" and not request.names_hosts:
        hosts = _hosts_of_job(environ, request)
    # Hydra wraps around to the first host.
    bounded = vendor == "openmpi" or not own
    if bounded and not any(name in environ for name in _OVERSUBSCRIBING):
        if request.per_node is None:
            _require_slots(request, hosts)
        else:
            _require_hosts(request, hosts, own, has_allocation(environ))
    return replace(request, hosts=hosts)


def _require_slots(request: LaunchRequest, hosts: Sequence[Host]) -> None:
    known = hosts and all(host.slots is not None for host in hosts)
    if known and request.ranks is not None:
        require_slots(hosts, request.ranks, request.hostfile or "-H")


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


def _hosts_of_job(environ: Mapping[str, str], request: LaunchRequest) -> tuple[Host, ...]:
    names = (form for name, form in _UNKNOWN_TO_OPEN_MPI.items() if name in environ)
    form = next(names, None)
    if form is None:
        return ()
    hosts = FORMATS[form].read(source_of_job(form, environ))
    if any(host.slots is None for host in hosts):  # of Flux
        each = request.per_node or -(-(request.ranks or len(hosts)) // len(hosts))
        hosts = [replace(host, slots=each) for host in hosts]
    return tuple(hosts)


def _hosts_of(path: str, launcher: Launcher, vendor: str) -> list[Host]:
    if launcher.name == "mpirun":
        return read_hostfile(path, vendor)
    # The others take no file, so any format will do.
    return read_hostfile(path, guess_format(read_file(path)))
