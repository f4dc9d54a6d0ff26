"""The gloo and nccl engines: torch.distributed, with ranks found through MPI or torchrun."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.errors import EngineUnavailableError


@collective
def open_gloo(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Join all ranks over gloo, for host memory."""
    _require("gloo")
    return _open("gloo", config, environ)


@collective
def open_nccl(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Join all ranks over NCCL for CUDA memory and gloo for host memory."""
    _require("nccl")
    import torch

    if not torch.cuda.is_available():
        raise EngineUnavailableError("engine nccl finds no GPU here: use gloo or mpi")
    return _open("nccl", config, environ)


def _require(backend: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise EngineUnavailableError(f"engine {backend} needs PyTorch: pip install torch")
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_backend_available(backend):
        raise EngineUnavailableError(
            f"engine {backend} is not in this build of PyTorch: install one that has it, or use mpi"
        )


@collective
def _open(backend: str, config: Config, environ: Mapping[str, str]) -> EngineWorld:
    from hvdtrain.engines.torch_distributed.communicator import TorchCommunicator
    from hvdtrain.engines.torch_distributed.failures import Members
    from hvdtrain.engines.torch_distributed.rendezvous import open_on_ranks

    def open_on(
        members: Members, nodes: tuple[int, ...], hostnames: tuple[str, ...]
    ) -> EngineWorld:
        communicator = TorchCommunicator(members, backend == "nccl", config.halves_in_float32)
        library = _library(backend)
        return EngineWorld(backend, library, communicator, nodes, hostnames, members.failures)

    return open_on_ranks(config, environ, open_on, takes_newcomers=backend == "gloo")


def _library(backend: str) -> str:
    """Return e.g. "torch 2.13.0, gloo" or "torch 2.13.0, nccl 2.27.3"."""
    import torch

    nccl: Any = torch.cuda.nccl
    version = " " + ".".join(map(str, nccl.version())) if backend == "nccl" else ""
    return f"torch {torch.__version__}, {backend}{version}"
