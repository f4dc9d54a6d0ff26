"""Going on with the ranks that are left: how far each has got, and the state of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.train.checkpoint.file import NO_POSITION, load_checkpoint
from hvdtrain.train.checkpoint.saver import LoadedCheckpoint, newest_good
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary
from hvdtrain.train.loop.protocol import TrainingState
from hvdtrain.train.loop.snapshots import Snapshots
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records import drop_lines_after, usage_errors
from hvdtrain.train.resume import RunState, StateLoader, WorldSettings


class MemoryLoader(StateLoader):
    """Goes on with the state of one of the ranks that are left; see agree()."""

    def __init__(self, options: TrainOptions, agreed: RunState, content: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._agreed, self._content = agreed, content

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Return no settings: there are other ranks than before (rank 0 only)."""
        return WorldSettings()

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunState:
        """Load the state, and remove lines about steps that are taken again (rank 0 only)."""
        state.load(self._content)
        self._content = {}  # as large as the model
        # Lines of the last step are written again where what follows it is done again.
        again = self._agreed.pausing is not None
        drop_lines_after(self._agreed.directory, self._agreed.progress.step - again)
        return self._agreed


class SnapshotLoader(StateLoader):
    """Goes back to the last snapshot in memory, or else to the newest checkpoint of the run."""

    def __init__(
        self, options: TrainOptions, before: RunState | None, snapshots: Snapshots
    ) -> None:
        super().__init__(options)
        self._before, self._snapshots = before, snapshots

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Find what to go back to, and return no settings: there are other ranks (rank 0 only)."""
        assert self._before is not None
        directory, resumed = self._before.directory, self._options.resume
        snapshot = self._snapshots.content()
        found = LoadedCheckpoint()
        if snapshot:
            found = LoadedCheckpoint(Path("snapshot in memory"), snapshot)
        position = (snapshot["epoch"], snapshot["done"]) if snapshot else NO_POSITION
        # Else the best checkpoint of the directory could be one of steps that are taken again.
        with usage_errors(directory):
            saved = newest_good(directory, library, position)
        self._warn(saved.bad)
        if saved.path is not None:
            found = saved
        elif found.path is None and resumed not in ("auto", "never"):
            found = LoadedCheckpoint(Path(resumed), load_checkpoint(Path(resumed), library))
        self.found = found
        return WorldSettings()

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunState:
        """Load the state, and remove lines about steps that are taken again (rank 0 only)."""
        assert self._before is not None
        path, directory, times = self.found.path, self._before.directory, self._before.progress
        progress = self._restore(epoch_samples, state)
        origin = "the start: there is no snapshot and no checkpoint"
        if path is not None:
            origin = f"{path}, {progress.text} done"
        drop_lines_after(directory, progress.step)
        progress = replace(
            progress,
            total_seconds=times.total_seconds,
            communicate_seconds=times.communicate_seconds,
        )
        return RunState(directory, progress, origin, path is not None)


@collective
def agree(options: TrainOptions, before: RunState | None) -> MemoryLoader:
    """Return what all ranks continue from: the state of one furthest ahead."""
    reached = None if before is None else (before.progress.step, before.paused)
    rows = allgather_object(reached, "progress")
    there = [row for row in rows if row is not None]
    furthest = max(step for step, _ in there)
    leader = [row and row[0] for row in rows].index(furthest)
    paused = all(row == (furthest, True) for row in there)
    told: Any = None
    content: Mapping[str, Any] = {}
    if before is not None and context.current().topology.rank == leader:
        progress = before.progress if paused else before.pausing or before.progress
        origin = f"the ranks that are left, {progress.text} done"
        told = RunState(before.directory, progress, origin, True, None if paused else progress)
        content = before.trained.snapshot().content()
    agreed = broadcast_object(told, leader, "progress")
    if leader:
        content = broadcast_object(content, leader, "state")
    return MemoryLoader(options, agreed, content)
