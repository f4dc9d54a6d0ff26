"""What a site's settings make slow, or make wait for ever, and what to set instead."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdtrain.check.probe import Section

_FEW_FILES = 1024
_VIRTUAL = ("lo", "docker", "veth", "virbr", "br-", "tun", "tap", "cni", "flannel", "podman")


def check_site(cores: float) -> Section:
    """Report what can be seen of networks, limits and the scheduler."""
    limits = {
        name: resource.getrlimit(number)[0]
        for name, number in (("files", resource.RLIMIT_NOFILE), ("locked", resource.RLIMIT_MEMLOCK))
    }
    advice = list(site_advice(os.environ, Path("/sys/class"), cores, limits))
    return Section("site", {"advice": advice, "limits": limits}, tuple(advice) or ("no remarks",))


def site_advice(
    environ: Mapping[str, str], classes: Path, cores: float, limits: Mapping[str, int]
) -> Iterator[str]:
    """Yield one line for each thing to correct; `classes` is Linux's /sys/class."""
    gpu_aware = environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    if gpu_aware and environ.get("HVDTRAIN_ENGINE") != "mpi":
        yield (
            "MPICH_GPU_SUPPORT_ENABLED=1: GPU-aware MPI beside NCCL may wait for ever: set it to "
            "0, or HVDTRAIN_ENGINE=mpi"
        )
    slingshot, infiniband = (_has(classes / name) for name in ("cxi", "infiniband"))
    if slingshot and not _finds("libnccl-net*.so*", environ):
        yield (
            "Slingshot, but no libnccl-net.so in LD_LIBRARY_PATH: NCCL would use TCP. Load the "
            "site's aws-ofi-nccl, and set NCCL_NET='AWS Libfabric', so that NCCL ends without it"
        )
    interfaces = sorted(_interfaces(classes / "net"))
    asked = environ.keys() & {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    if len(interfaces) > 1 and not asked:
        yield (
            f"interfaces {', '.join(interfaces)}: libraries may choose different ones; name the "
            "one between nodes with run --interface, or in NCCL_SOCKET_IFNAME and "
            "GLOO_SOCKET_IFNAME"
        )
    if (slingshot or infiniband) and limits["locked"] != resource.RLIM_INFINITY:
        yield f"ulimit -l is {limits['locked'] >> 10} KiB: fast networks need unlimited"
    if 0 <= limits["files"] < _FEW_FILES:
        yield f"ulimit -n is {limits['files']}: ranks and data loaders need {_FEW_FILES} or more"
    threads, ranks = (
        environ.get(name, "") for name in ("OMP_NUM_THREADS", "SLURM_NTASKS_PER_NODE")
    )
    if threads.isdecimal() and ranks.isdecimal() and int(threads) * int(ranks) > cores:
        yield (
            f"OMP_NUM_THREADS={threads} on {ranks} ranks, but {cores:g} cores: set it to "
            f"{max(1, int(cores) // int(ranks))}"
        )


def _has(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _finds(pattern: str, environ: Mapping[str, str]) -> bool:
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    return any(next(Path(folder).glob(pattern), None) for folder in folders if folder)


def _interfaces(folder: Path) -> Iterator[str]:
    """Yield the interfaces of a machine that are up, but for virtual ones."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        state = entry / "operstate"
        up = state.is_file() and state.read_text().strip() == "up"
        if up and not entry.name.startswith(_VIRTUAL):
            yield entry.name
