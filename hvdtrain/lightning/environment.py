"""What Lightning asks of ranks: their places, metrics of them all, and each sample once."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.data.sampling import steps_per_epoch

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
        return True

    @property
    def main_address(self) -> str:
        return context.current().topology.hostnames[0]

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return hvd.is_initialized()

    def world_size(self) -> int:
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Change nothing: the launcher has determined the size."""

    def global_rank(self) -> int:
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Change nothing: the launcher has determined the rank."""

    def local_rank(self) -> int:
        return hvd.local_rank()

    def node_rank(self) -> int:
        return hvd.cross_rank()


# Warnings of Lightning that are true of its own samplers only.
EVALUATING = "Using `DistributedSampler` with the dataloaders"
_RESUMING = "You're resuming from a checkpoint that ended before the epoch ended"


def omit_padding(loader: object) -> None:
    """Have a loader's DistributedSampler repeat no samples, of which ranks then differ by one."""
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    if isinstance(sampler, DistributedSampler):
        samples = len(cast(Any, sampler.dataset))
        sampler.drop_last = False
        sampler.total_size = samples
        sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))


def draw_together(loader: object) -> None:
    """Have the program's own sampler, whose draws Lightning divides among ranks, draw on rank 0."""
    if not isinstance(loader, DataLoader):
        return
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not isinstance(sampler, load_fabric("utilities.distributed").DistributedSamplerWrapper):
        return
    drawn: Any = sampler.dataset

    def reset() -> None:
        drawn._sampler_list = hvd.broadcast_object([*drawn._sampler])

    drawn.reset = reset


class TrainingSampler(DistributedSampler[Any]):
    """Divides each global batch among the ranks; all have the same number of batches.

    The order is that of DistributedSampler, which repeats samples instead. A rank that has no
    sample of a short last batch gets one for the sake of its shape, with weight 0.

    Where training has several loaders it does what DistributedSampler does: their batches may
    differ in size, so no weight of a loss is right. How many there are is known only when they are
    used.
    """

    def __init__(
        self,
        replaced: DistributedSampler[Any],
        batch_size: int,
        drop_last: bool,
        loop: Any,
    ) -> None:
        size, rank, shuffle = replaced.num_replicas, replaced.rank, replaced.shuffle
        super().__init__(replaced.dataset, size, rank, shuffle, replaced.seed)
        self.replaced, self._loop = replaced, loop
        self._start = _next_batch(loop)
        # Workers ask for samples before Lightning tells the epoch.
        self.set_epoch(self._start[0])
        self._whole = batch_size * size
        samples = len(cast(Any, self.dataset))
        self._samples = samples - samples % self._whole if drop_last else samples
        self._batches = steps_per_epoch(self._samples, self._whole)
        self._length = sum(max(1, self._count(batch)) for batch in range(self._batches))

    @property
    def _divides(self) -> bool:
        """Whether training has one loader."""
        loaders = self._loop._combined_loader
        return loaders is not None and len(loaders.flattened) == 1

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.replaced.set_epoch(epoch)

    def __len__(self) -> int:
        return self._length if self._divides else len(self.replaced)

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the batches that are not done yet."""
        if not self._divides:
            yield from self.replaced
            return
        alone: DistributedSampler[Any] = DistributedSampler(
            self.dataset, 1, 0, self.shuffle, self.seed
        )
        alone.set_epoch(self.epoch)
        order = list(alone)
        epoch, first = self._start
        for batch in range(first if self.epoch == epoch else 0, self._batches):
            whole = order[batch * self._whole : min((batch + 1) * self._whole, self._samples)]
            yield from whole[self.rank :: self.num_replicas] or whole[:1]

    def weight(self, batch: int) -> float:
        """Return the factor of this rank's mean loss with which the ranks' average is exact."""
        if not self._divides:
            return 1.0
        return self._count(batch) * self.num_replicas / self._global_count(batch)

    def _global_count(self, batch: int) -> int:
        return min(self._whole, self._samples - batch * self._whole)

    def _count(self, batch: int) -> int:
        return len(range(self.rank, self._global_count(batch), self.num_replicas))


def divide_training(loader: object, trainer: Any) -> object:
    """Return a loader with a TrainingSampler in place of Lightning's; others as they are."""
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    if isinstance(sampler, TrainingSampler):  # of another Trainer that had this CombinedLoader
        sampler = sampler.replaced
    if not isinstance(loader, DataLoader) or type(sampler) is not DistributedSampler:
        return loader
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return loader
    warnings.filterwarnings("ignore", message=_RESUMING)
    own = TrainingSampler(sampler, loader.batch_size, loader.drop_last, trainer.fit_loop)
    data = importlib.import_module(f"{PYTORCH.__name__}.utilities.data")
    divided: object = data._update_dataloader(loader, own)
    return divided


def weight_of(batch: int, trainer: Any) -> float:
    """Return the factor of this rank's mean loss with which the ranks' average is exact."""
    sampler = getattr(trainer.fit_loop._combined_loader.flattened[0], "sampler", None)
    return sampler.weight(batch) if isinstance(sampler, TrainingSampler) else 1.0


def _next_batch(loop: Any) -> tuple[int, int]:
    """Return the epoch and the number of the batch with which training begins or continues."""
    # A checkpoint may be of the end of a batch, even the last one, which is processed but not
    # completed, or of an exception in a batch that is then begun again.
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    epoch, batch = int(epochs.current.processed), int(batches.current.processed)
    if not loop.restarting or epochs.total.processed != epochs.total.started - 1:
        return epoch, 0
    if batches.is_last_batch and batch == batches.current.ready:
        return epoch + 1, 0
    return epoch, batch
