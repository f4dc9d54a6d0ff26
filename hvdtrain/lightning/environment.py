"""The installed Lightning, and what it asks of ranks: their places, and metrics of them all."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.core import context

__all__ = ["gather_states", "synchronize_metrics"]

# The second has the same content under other names; objects of one are unknown to the other.
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def load_pytorch() -> ModuleType:
    """Return the library that the program has imported already, else the first one installed."""
    loaded = [name for name in _FABRICS if name in sys.modules]
    for name in loaded or _FABRICS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("hvdtrain.lightning needs Lightning 2: pip install lightning")


def load_fabric(name: str) -> ModuleType:
    """Return a module of the Fabric that belongs to the library."""
    return importlib.import_module(f"{_FABRICS[PYTORCH.__name__]}.{name}")


def load_utilities(name: str) -> ModuleType:
    """Return a module of the library's utilities."""
    return importlib.import_module(f"{PYTORCH.__name__}.utilities.{name}")


PYTORCH = load_pytorch()
ClusterEnvironment: Any = load_fabric("plugins.environments").ClusterEnvironment
LayerSync: Any = PYTORCH.plugins.LayerSync
ParallelStrategy: Any = PYTORCH.strategies.ParallelStrategy


def synchronize_metrics(model: torch.nn.Module) -> None:
    """Have the metrics of a model combine the states of all ranks in `compute()`."""
    from torchmetrics import Metric  # after Lightning, which has it, and whose absence is explained

    for metric in model.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn in (None, gather_states):
            metric.dist_sync_fn = gather_states
            metric.distributed_available_fn = _joined


@collective
def gather_states(state: torch.Tensor, group: hvd.ProcessSet | None = None) -> list[torch.Tensor]:
    """Return the tensors of all ranks, by rank, which may differ in shape (collective).

    Args:
        state: tensor of this rank.
        group: ranks that take part; None for all.
    """
    members = group or hvd.global_process_set
    shapes = hvd.allgather_object(tuple(state.shape), process_set=members)
    flat = hvd.allgather(state.detach().reshape(-1), process_set=members)
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _joined() -> bool:
    return hvd.is_initialized() and hvd.size() > 1


class HvdEnvironment(ClusterEnvironment):
    """Ranks and sizes as `init()` found them."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether a launcher has started the ranks: always."""
        return True

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return context.current().topology.hostnames[0]

    @property
    def main_port(self) -> int:
        """No port: hvdtrain's ranks have met already."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return whether `init()` was called."""
        return hvd.is_initialized()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Change nothing: the launcher has determined the size."""

    def global_rank(self) -> int:
        """Return this rank."""
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Change nothing: the launcher has determined the rank."""

    def local_rank(self) -> int:
        """Return the number of this rank on its node."""
        return hvd.local_rank()

    def node_rank(self) -> int:
        """Return the number of the node."""
        return hvd.cross_rank()
