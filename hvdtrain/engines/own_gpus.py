"""Whether every rank has a GPU of its own, for which "auto" takes engine nccl."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.devices import MASKS
from hvdtrain.engines.communicator import EngineWorld

__all__ = ["Seen", "gpus_of", "objection_to_nccl", "see_gpus"]


@dataclass(frozen=True)
class Seen:
    """What a rank sees of GPUs.

    Attributes:
        count: how many it may take; -1 where it has no use for NCCL.
        mask: stands for the variables that hide others from it; 0 for none.
    """

    count: int
    mask: int = 0


def see_gpus(modules: Mapping[str, ModuleType], environ: Mapping[str, str]) -> Seen:
    """Look at the GPUs of this rank (local).

    Only a program that has loaded hvdtrain.torch is asked for: torch would take seconds to load,
    and the tensors of TensorFlow and JAX come to an engine as host memory.

    Args:
        modules: that are loaded.
        environ: the environment.
    """
    torch: Any = modules.get("torch")
    if torch is None or "hvdtrain.torch" not in modules or "hvdtrain.tensorflow" in modules:
        return Seen(-1)
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Seen(-1)
    masks = [f"{name}={environ[name]}" for name in MASKS if name in environ]
    # A driver may count GPUs that this build of torch cannot use.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Seen(count, crc32(" ".join(masks).encode()) if masks else 0)


def gpus_of(world: EngineWorld, own: Seen) -> list[Seen]:
    """Return what each rank sees, by rank (collective)."""
    size = world.communicator.size
    sent, everybodys = np.array([own.count, own.mask]), np.empty((size, 2), np.int64)
    world.communicator.allgather(Buffer.of(sent), Buffer.of(everybodys), [2] * size)
    return [Seen(*row) for row in everybodys.tolist()]


def objection_to_nccl(
    seen: Sequence[Seen], nodes: Sequence[int], hostnames: Sequence[str]
) -> str | None:
    """Return why ranks are not to take NCCL, or None if they are (pure, alike on all ranks).

    Args:
        seen: by rank.
        nodes: by rank, a number that ranks of a node share.
        hostnames: by rank.

    Returns:
        "" where there is no GPU to talk of.
    """
    if all(own.count <= 0 for own in seen):
        return ""
    for rank, own in enumerate(seen):
        if own.count < 0:
            return f"rank {rank} has not loaded hvdtrain.torch with NCCL, but others have"
        if own.count == 0:
            return f"rank {rank} on {hostnames[rank]} sees no GPU"
    here = defaultdict(list)
    for rank, node in enumerate(nodes):
        here[node].append(rank)
    for ranks in here.values():
        least = min(seen[rank].count for rank in ranks)
        if least < len(ranks) and not _masked_apart([seen[rank] for rank in ranks]):
            gpus = f"{least} GPU{'s' * (least > 1)}"
            return f"{len(ranks)} ranks on {hostnames[ranks[0]]} see {gpus}"
    return None


def _masked_apart(seen: Sequence[Seen]) -> bool:
    """Return whether a scheduler has left each of a node's ranks one GPU, and another one."""
    masks = {own.mask for own in seen if own.count == 1 and own.mask}
    return len(masks) == len(seen)
