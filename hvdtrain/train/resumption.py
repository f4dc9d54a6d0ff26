"""Going on from a checkpoint: found before the model is built, loaded after."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Self

from hvdtrain.core.context import Context
from hvdtrain.core.gradients.bucket_size import BucketSize
from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint.directory import Found
from hvdtrain.train.checkpoint.tensor_file import Framework as Tensors
from hvdtrain.train.loop.protocol import Framework, Loop, State
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.start import Start, begin, find_checkpoint

__all__ = ["Resumption", "WorldFacts", "world_facts"]


@dataclass(frozen=True)
class WorldFacts:
    """What decides how the sums of a run round; a checkpoint holds it.

    Attributes:
        size: how many ranks there were.
        bucket_bytes: the limit of a bucket; None: not known.
        plan: in which order gradients were reduced; None: not known.
        threads: that each rank computed with; None: not known.
    """

    size: int = 0
    threads: tuple[int | None, ...] = ()
    bucket_bytes: int | None = None
    plan: Any = None

    def checked(self) -> Self:
        """Return it; ValueError: it contradicts itself."""
        if len(self.threads) != self.size:
            raise ValueError(f"it has threads of {len(self.threads)} ranks, but {self.size} ranks")
        return self

    def prepare(self, world: Context, framework: Framework) -> None:
        """Take over threads and the size of buckets, before the optimizer is there (local)."""
        if self.size != world.topology.size:
            return
        if self.bucket_bytes is not None:
            size = BucketSize(self.bucket_bytes, "as in the checkpoint")
            world.bucket_sizes[world.world] = size
        threads = self.threads[world.topology.rank]
        if threads is not None:
            framework.use_threads(threads)

    def apply(self, loop: Loop, world: Context) -> None:
        """Take over the order of gradients (collective)."""
        if self.size == world.topology.size and self.plan is not None:
            loop.use_plan(self.plan)


def world_facts(world: Context, loop: Loop, threads: tuple[int | None, ...]) -> dict[str, Any]:
    """Return what WorldFacts holds, of now (rank 0 only)."""
    size = world.bucket_sizes.get(world.world)
    return {
        "size": world.topology.size,
        "bucket_bytes": None if size is None else size.nbytes,
        "plan": loop.plan(),
        "threads": threads,
    }


class Resumption:
    """Reads a checkpoint on rank 0, in two steps.

    Args:
        options: of the run.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._found = Found()

    def find(self, tensors: Tensors) -> WorldFacts:
        """Find the checkpoint that the options ask for; say which are damaged (rank 0 only).

        Args:
            tensors: what its tensors are to be, "pt" or "np".

        Raises:
            UsageError: none can be used.
        """
        self._found = find_checkpoint(self._options, tensors)
        for warning in self._found.bad:
            print(f"hvdtrain: {warning}", file=sys.stderr, flush=True)
        try:
            return WorldFacts(**self._found.content.get("world", {})).checked()
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"checkpoint {self._found.path} lacks what is needed: {error}"
            ) from error

    def begin(self, epoch_samples: int, state: State) -> Start:
        """Load what was found, and prepare the directory (rank 0 only).

        Raises:
            UsageError: it does not fit, or the directory cannot be used.
        """
        start = begin(self._options, epoch_samples, state, self._found)
        self._found = Found()  # its tensors take as much memory as the model
        return start
