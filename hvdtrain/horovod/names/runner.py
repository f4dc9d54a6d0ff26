"""`horovod.runner`: Horovod's `run`, on the ranks that `hvdtrain.run` starts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hvdtrain.errors import UsageError
from hvdtrain.launch.calls import call
from hvdtrain.launch.hosts.host import is_here

__all__ = ["run"]

Result = TypeVar("Result")

# Horovod's arguments that would start other ranks; the others have no effect.
_ELSEWHERE = (
    *("host_discovery_script", "min_num_proc", "max_num_proc", "min_np", "max_np"),
    *("mpi_args", "output_filename", "executable"),
)
_WITHOUT_MEANING = (
    *("slots", "reset_limit", "cooldown_range", "start_timeout", "ssh_port", "ssh_identity_file"),
    *("disable_cache", "verbose", "use_gloo", "use_mpi", "network_interface", "network_interfaces"),
)


def run(
    func: Callable[..., Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int = 1,
    hosts: str | None = None,
    np: int | None = None,
    hostfile: str | None = None,
    **settings: object,
) -> list[Result]:
    """Call a function on every rank of a new job, and return what each one returned."""
    unknown = sorted(set(settings) - {*_ELSEWHERE, *_WITHOUT_MEANING})
    if unknown:
        raise TypeError(f"run() has no argument {unknown[0]!r}")
    refused = [name for name in _ELSEWHERE if settings.get(name) is not None]
    if refused:
        raise UsageError(
            f"run() takes no {', '.join(refused)}: start the script with `python -m hvdtrain run`, "
            "which takes more"
        )
    if np is not None:
        warnings.warn("np is deprecated, use num_proc", DeprecationWarning, stacklevel=2)
    ranks = num_proc if np is None else np
    if hosts and all(is_here(part.partition(":")[0].strip()) for part in hosts.split(",")):
        hosts = None  # for which no remote shell is needed
    return call.run(func, args, kwargs, np=ranks, hosts=hosts, hostfile=hostfile)
