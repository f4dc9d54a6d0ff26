"""Going on with the ranks that are left: how far each has got, and the state of one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.core import context
from hvdtrain.core.context import Recovery
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary
from hvdtrain.train.loop.protocol import TrainingLoop, TrainingState
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.progress import Progress
from hvdtrain.train.records.results import drop_lines_after
from hvdtrain.train.resume import RunStart, WorldSettings

__all__ = ["MemoryLoader", "Standing", "agree", "losses", "obstacle"]


@dataclass(frozen=True)
class Standing:
    """How far a rank had got when others ended.

    Attributes:
        reached: progress with all steps that were taken, and all that was done after the last one.
        before: the same without what was done after the last step.
        paused: whether all that was due after the last step is done.
        state: weights, optimizer and so on, after the last step.
        directory: directory of the run.
    """

    reached: Progress
    before: Progress
    paused: bool
    state: TrainingState
    directory: Path


class MemoryLoader:
    """Goes on with the state of one of the ranks that are left; see agree().

    Args:
        progress: progress to go on from, equal on all ranks.
        pauses: whether what is due after the last step is still to be done.
        directory: directory of the run.
        content: snapshot of the state; needed on rank 0 only.
    """

    def __init__(
        self, progress: Progress, pauses: bool, directory: Path, content: Mapping[str, Any]
    ) -> None:
        self.progress, self._pauses, self._directory = progress, pauses, directory
        self._content = content

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Return no settings: there are other ranks than before (rank 0 only).

        Args:
            library: unused.
        """
        return WorldSettings()

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunStart:
        """Load the state, and remove lines about steps that are taken anew (rank 0 only).

        Args:
            epoch_samples: unused.
            state: state of the new model.
        """
        state.load(self._content)
        self._content = {}  # as large as the model
        # Lines of the last step are written again where what follows it is done again.
        drop_lines_after(self._directory, self.progress.step - self._pauses)
        origin = f"the ranks that are left, {self.progress.text} done"
        return RunStart(self._directory, self.progress, origin, True, self._pauses)

    def restore_exchange(self, loop: TrainingLoop, start: RunStart) -> None:
        """Do nothing: see obstacle().

        Args:
            loop: unused.
            start: unused.
        """


def agree(standing: Standing | None) -> MemoryLoader:
    """Return what all ranks go on from: the state of one furthest ahead (collective).

    Args:
        standing: how far this rank had got. A step's update happens on a rank as a whole or not at
            all, and ranks differ by one step at most. None on a rank that has joined.
    """
    reached = None if standing is None else (standing.reached.step, standing.paused)
    rows = allgather_object(reached, "progress")
    there = [row for row in rows if row is not None]
    furthest = max(step for step, _ in there)
    leader = [row and row[0] for row in rows].index(furthest)
    paused = all(row == (furthest, True) for row in there)
    told: Any = None
    content: Mapping[str, Any] = {}
    if standing is not None and context.current().topology.rank == leader:
        progress = standing.reached if paused else standing.before
        told = progress, standing.directory
        content = standing.state.snapshot().content()
    progress, directory = broadcast_object(told, leader, "progress")
    if leader:
        content = broadcast_object(content, leader, "state")
    return MemoryLoader(progress, not paused, directory, content)


def losses(
    recovery: Recovery, leaving: Collection[int]
) -> Iterator[tuple[tuple[int, ...], int, bool]]:
    """Yield ranks that were lost, how many were left then, and whether these had left by request.

    Args:
        recovery: recovery from the loss.
        leaving: ranks that left by request.
    """
    left = tuple(rank for rank in recovery.lost if rank in leaving)
    ended = tuple(rank for rank in recovery.lost if rank not in leaving)
    if left:
        yield left, recovery.size_before - len(left), True
    if ended:
        yield ended, recovery.left, False


def obstacle(options: TrainOptions) -> str:
    """Return the option with which a run cannot go on without some of its ranks; "" if it can.

    Args:
        options: options of the run.
    """
    if options.framework != "torch":
        return f"--framework {options.framework}"
    if options.parameter_server is not None:
        return f"--strategy {options.strategy}"
    if options.make_exchange() is not None:
        return f"--exchange {options.exchange}"
    if options.shard_optimizer:
        return "--shard-optimizer"
    return "--virtual-shards" if options.virtual_shards is not None else ""
