"""Engines by name, imported on demand."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace

from hvdtrain.config import Config
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.engines.own_gpus import gpus_of, objection_to_nccl, see_gpus
from hvdtrain.errors import UsageError
from hvdtrain.world import TORCHRUN, promised_world, under_launcher

__all__ = ["ENGINES", "choose_engine", "open_engine", "open_world"]

ENGINES = {
    "local": "hvdtrain.engines.local",
    "mpi": "hvdtrain.engines.mpi.engine",
    "gloo": "hvdtrain.engines.torch_distributed.engine:open_gloo",
    "nccl": "hvdtrain.engines.torch_distributed.engine:open_nccl",
    "horovod": "hvdtrain.engines.horovod.engine",
}


def choose_engine(name: str, environ: Mapping[str, str]) -> str:
    """Resolve "auto": gloo under torchrun, mpi where another launcher started us, else local.

    What it says is of ranks that have no GPU each; see open_engine().

    Raises:
        UsageError: there is no engine of that name.
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


def open_engine(name: str, config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Join the world of an engine, or of the one that "auto" stands for (collective).

    Which GPUs others see only they know. So "auto" meets them over the engine for host memory;
    where each has a GPU of its own, they leave it for nccl, all of them or none.

    Raises:
        UsageError: there is no engine of that name; see open_world() for the others.
    """
    world = open_world(choose_engine(name, environ), config, environ)
    if name != "auto" or world.communicator.size == 1:
        return world
    seen = gpus_of(world, see_gpus(sys.modules, environ))
    objection = objection_to_nccl(seen, world.nodes, world.hostnames)
    if objection is None:
        world.communicator.close()
        world = open_world("nccl", config, environ)
        return replace(world, library=f"{world.library}; each rank has a GPU of its own")
    if objection:
        return replace(world, library=f"{world.library}; not nccl: {objection}")
    return world


def open_world(name: str, config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Load an engine and join its world (collective).

    Raises:
        EngineUnavailableError: what the engine needs is not installed.
        LauncherMismatchError: the launcher and the library do not belong together.
    """
    module, _, function = ENGINES[name].partition(":")
    join = getattr(importlib.import_module(module), function or "open_world")
    world: EngineWorld = join(config, environ)
    return world
