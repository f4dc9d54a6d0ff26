"""Going on with the ranks that are left: how far each has got, and the state of one of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.train.checkpoint.file import NO_POSITION, load_checkpoint
from hvdtrain.train.checkpoint.saver import LoadedCheckpoint, newest_good
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary
from hvdtrain.train.loop.protocol import ExchangeRecord, TrainingLoop, TrainingState
from hvdtrain.train.loop.snapshots import Found
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records import drop_lines_after, usage_errors
from hvdtrain.train.resume import (
    Progress,
    RunStart,
    WorldSettings,
    restore_or_warn,
    restore_progress,
)


@dataclass(frozen=True)
class Standing:
    """How far a rank had got when others ended."""

    reached: Progress
    before: Progress
    paused: bool
    state: TrainingState
    directory: Path


class MemoryLoader:
    """Goes on with the state of one of the ranks that are left; see agree()."""

    def __init__(
        self, progress: Progress, pauses: bool, directory: Path, content: Mapping[str, Any]
    ) -> None:
        self.progress, self._pauses, self._directory = progress, pauses, directory
        self._content = content

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Return no settings: there are other ranks than before (rank 0 only)."""
        return WorldSettings()

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunStart:
        """Load the state, and remove lines about steps that are taken again (rank 0 only)."""
        state.load(self._content)
        self._content = {}  # as large as the model
        # Lines of the last step are written again where what follows it is done again.
        drop_lines_after(self._directory, self.progress.step - self._pauses)
        origin = f"the ranks that are left, {self.progress.text} done"
        return RunStart(self._directory, self.progress, origin, True, self._pauses)

    def restore_exchange(self, loop: TrainingLoop, start: RunStart) -> None:
        """Do nothing: there is none, see needs_snapshots()."""


class SnapshotLoader:
    """Goes back to the last snapshot in memory, or else to the newest checkpoint of the run."""

    def __init__(self, options: TrainOptions, standing: Standing | None, found: Found) -> None:
        self._options, self._standing, self._snapshot = options, standing, found
        self._found = LoadedCheckpoint()
        self._exchange: ExchangeRecord | None = None

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Find what to go back to, and return no settings: there are other ranks (rank 0 only)."""
        assert self._standing is not None
        directory, resumed = self._standing.directory, self._options.resume
        found = LoadedCheckpoint()
        if self._snapshot.step >= 0:
            found = LoadedCheckpoint(Path("snapshot in memory"), self._snapshot.content())
        # Else the best checkpoint of the directory could be one of steps that are taken again.
        with usage_errors(directory):
            saved = newest_good(directory, library, _position(found))
        for warning in saved.bad:
            print(f"hvdtrain: {warning}", file=sys.stderr, flush=True)
        if saved.path is not None:
            found = saved
        elif found.path is None and resumed not in ("auto", "never"):
            found = LoadedCheckpoint(Path(resumed), load_checkpoint(Path(resumed), library))
        self._found = found
        return WorldSettings()

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunStart:
        """Load the state, and remove lines about steps that are taken again (rank 0 only)."""
        assert self._standing is not None
        path, content = self._found.path, self._found.content
        directory, before = self._standing.directory, self._standing.reached
        progress, origin = Progress(), "the start: there is no snapshot and no checkpoint"
        if path is not None:
            progress = restore_progress(path, content, self._options, epoch_samples, state)
            origin = f"{path}, {progress.text} done"
        self._exchange = content.get("exchange")
        self._found = LoadedCheckpoint()  # as large as the model
        drop_lines_after(directory, progress.step)
        seconds = before.total_seconds, before.communicate_seconds
        progress = replace(progress, total_seconds=seconds[0], communicate_seconds=seconds[1])
        return RunStart(directory, progress, origin, path is not None)

    @collective
    def restore_exchange(self, loop: TrainingLoop, start: RunStart) -> None:
        """Restore the state of the exchange; warn about what is lost."""
        restore_or_warn(loop, start, self._exchange)
        self._exchange = None


def _position(found: LoadedCheckpoint) -> tuple[int, int]:
    """Return the epochs and samples of a snapshot; those of no checkpoint if there is none."""
    return (found.content["epoch"], found.content["done"]) if found.content else NO_POSITION


@collective
def agree(standing: Standing | None) -> MemoryLoader:
    """Return what all ranks continue from: the state of one furthest ahead."""
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
