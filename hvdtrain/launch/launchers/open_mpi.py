"""mpirun of Open MPI 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.launch.launchers.request import (
    LaunchCommand,
    LaunchRequest,
    Site,
    has_allocation,
    interface_variables,
    logged,
)

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


def open_mpi_4(request: LaunchRequest, site: Site) -> LaunchCommand:
    """Return the command line of Open MPI 4's mpirun."""
    return _mpirun(request, site, _4)


def open_mpi_5(request: LaunchRequest, site: Site) -> LaunchCommand:
    """Return the command line of Open MPI 5's mpirun."""
    return _mpirun(request, site, _5)


def _mpirun(request: LaunchRequest, site: Site, dialect: _Dialect) -> LaunchCommand:
    here = not request.names_hosts and not has_allocation(site.environ)
    flags = [
        *(["--with-ft", "ulfm"] if request.elastic else []),
        # Else ranks that join must not end while others go on, as those that are started here may.
        *(["--prtemca", "state_base_recoverable", "1"] if request.elastic else []),
        *_binding(request.bind, here, dialect),
        *_placement(request, here),
        *_interface(request.interface, here, dialect),
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


def _interface(interface: str | None, here: bool, dialect: _Dialect) -> list[str]:
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
