"""Engines by name, imported on demand, and the choice that "auto" makes."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from zlib import crc32

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.errors import UsageError
from hvdtrain.world import TORCHRUN, promised_world, under_launcher

ENGINES = {
    "local": "hvdtrain.engines.local",
    "mpi": "hvdtrain.engines.mpi.engine",
    "gloo": "hvdtrain.engines.torch_distributed.engine:open_gloo",
    "nccl": "hvdtrain.engines.torch_distributed.engine:open_nccl",
    "horovod": "hvdtrain.engines.horovod.engine",
}


def choose_engine(name: str, environ: Mapping[str, str]) -> str:
    """Resolve "auto": gloo under torchrun, mpi under another launcher, else local.

    This does not consider GPUs; see open_engine().
    """
    if name == "auto":
        promised = promised_world(environ)
        if promised is not None and promised.launcher == TORCHRUN:
            return "gloo" if promised.size > 1 else "local"
        return "mpi" if under_launcher(environ) else "local"
    if name not in ENGINES:
        known = ", ".join(["auto", *ENGINES])
        raise UsageError(f"unknown engine {name!r}: choose one of {known}")
    return name


@collective
def open_engine(name: str, config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Join the world of an engine, or of the one that "auto" selects.

    With "auto", ranks first exchange how many GPUs they see, over the engine for host memory. If
    each has a GPU of its own, all of them switch to nccl.
    """
    world = open_world(choose_engine(name, environ), config, environ)
    if name != "auto" or world.communicator.size == 1 or world.joined:
        return world
    visible = world.communicator.gather_objects(find_visible_gpus(sys.modules, environ))
    reason = reason_against_nccl(visible, world.nodes, world.hostnames)
    if reason is None:
        world.communicator.close()
        world = open_world("nccl", config, environ)
        return replace(world, library=f"{world.library}; each rank has a GPU of its own")
    if reason:
        return replace(world, library=f"{world.library}; not nccl: {reason}")
    return world


@collective
def open_world(name: str, config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Load an engine and join its world."""
    module, _, function = ENGINES[name].partition(":")
    join = getattr(importlib.import_module(module), function or "open_world")
    world: EngineWorld = join(config, environ)
    return world


@dataclass(frozen=True)
class VisibleGpus:
    count: int
    mask: int = 0


def find_visible_gpus(modules: Mapping[str, ModuleType], environ: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs that this rank sees; none unless hvdtrain.torch is loaded.

    Loading torch would take seconds, and engines get tensors of TensorFlow and JAX as host memory.
    """
    torch: Any = modules.get("torch")
    if torch is None or "hvdtrain.torch" not in modules or "hvdtrain.tensorflow" in modules:
        return VisibleGpus(-1)
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return VisibleGpus(-1)
    from hvdtrain.devices import MASKS  # not where there are no GPUs

    masks = [f"{name}={environ[name]}" for name in MASKS if name in environ]
    # A driver may count GPUs that this build of torch cannot use.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return VisibleGpus(count, crc32(" ".join(masks).encode()) if masks else 0)


def reason_against_nccl(
    visible: Sequence[VisibleGpus], nodes: Sequence[int], hostnames: Sequence[str]
) -> str | None:
    """Return why ranks must not use NCCL, or None if they can (the same on all ranks)."""
    if all(own.count <= 0 for own in visible):
        return ""
    for rank, own in enumerate(visible):
        if own.count < 0:
            return f"rank {rank} has not loaded hvdtrain.torch with NCCL, but others have"
        if own.count == 0:
            return f"rank {rank} on {hostnames[rank]} sees no GPU"
    here = defaultdict(list)
    for rank, node in enumerate(nodes):
        here[node].append(rank)
    for ranks in here.values():
        least = min(visible[rank].count for rank in ranks)
        # A scheduler may have left each of a node's ranks a different GPU.
        masks = {own.mask for own in (visible[rank] for rank in ranks) if own.count == 1}
        if least < len(ranks) and len(masks - {0}) < len(ranks):
            gpus = f"{least} GPU{'s' * (least > 1)}"
            return f"{len(ranks)} ranks on {hostnames[ranks[0]]} see {gpus}"
    return None
