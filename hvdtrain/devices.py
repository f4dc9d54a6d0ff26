"""The device and the threads of a rank, and the check that no two ranks share a GPU (all local)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology, cpu_threads

_INDEX = re.compile("[0-9]{1,4}")
# One for each layer of GPU software; each counts among the GPUs that the layer below shows.
MASKS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)


@dataclass(frozen=True)
class DeviceWish:
    """The device that the user requests for each rank."""

    kind: str = "auto"
    gpu_map: tuple[int, ...] = ()
    share: bool = False


@dataclass(frozen=True)
class Device:
    """The device of a rank."""

    name: str
    uuid: str = ""


def device_index(topology: Topology, visible: int, wish: DeviceWish | None = None) -> int:
    """Return the index of the GPU of this rank.

    With one visible GPU it is 0 (the scheduler has masked the others), with at least one per local
    rank the local rank. Otherwise ranks would share a GPU, which must be requested.
    """
    wish = wish or DeviceWish()
    local, host = topology.local_rank, topology.hostnames[topology.rank]
    if wish.gpu_map:
        if len(wish.gpu_map) < topology.local_size:
            raise UsageError(
                f"--gpu-map names {len(wish.gpu_map)} GPUs, but {host} has {topology.local_size} "
                "ranks: name one for each"
            )
        index = wish.gpu_map[local]
        if index >= visible:
            raise UsageError(
                f"--gpu-map gives local rank {local} GPU {index}, but {host} has {visible} here: "
                f"name 0 to {visible - 1}"
            )
        return index
    if visible == 1:
        return 0
    if visible >= topology.local_size:
        return local
    if wish.share:
        return local % visible
    raise UsageError(
        f"{topology.local_size} ranks on {host} but {visible} GPUs: start one rank for each GPU, "
        "or use --share-gpus or --device cpu"
    )


def no_gpus(framework: str, environ: Mapping[str, str]) -> UsageError:
    """Return the error for a rank that requires a GPU but sees none."""
    masks = [f"{name}={environ[name]}" for name in MASKS if name in environ]
    hidden = f" ({', '.join(masks)})" if masks else ""
    return UsageError(
        f"--device cuda: {framework} sees no GPU here{hidden}: use --device cpu or auto"
    )


def parse_gpu_map(text: str | None) -> tuple[int, ...]:
    """Parse a list of GPU indices such as "3,2,1,0"."""
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(_INDEX.fullmatch(word) for word in words):
        raise UsageError(f"--gpu-map {text!r}: give a GPU's index for each local rank, as 3,2,1,0")
    return tuple(map(int, words))


def require_own_devices(devices: Sequence[Device]) -> None:
    """Check that no two ranks use the same GPU."""
    seen: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device.uuid and (first := seen.setdefault(device.uuid, rank)) != rank:
            raise UsageError(
                f"ranks {first} and {rank} have the same GPU, {device.name}, {device.uuid}: start "
                "one rank for each GPU, let each rank see all GPUs of its host, or use --share-gpus"
            )


def threads_set_by_user() -> bool:
    """Return whether the user has set the number of threads."""
    return "OMP_NUM_THREADS" in os.environ


def thread_share(topology: Topology) -> int | None:
    """Return this rank's share of the cores; None if the user has set OMP_NUM_THREADS."""
    if threads_set_by_user():
        return None
    affinity, machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return cpu_threads(topology, affinity, machine)


def threads_text(threads: int) -> str:
    """Describe the processor: "cpu (2 threads)"."""
    return f"cpu ({threads} thread{'s' * (threads > 1)})"
