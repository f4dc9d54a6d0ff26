"""The checkpoints in the directory of a run, and writing them while training continues."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.milestones import SAVED, report
from hvdtrain.train.checkpoint.file import (
    BEST,
    CHECKPOINT,
    NO_POSITION,
    CheckpointName,
    load_checkpoint,
    write_checkpoint,
)
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint and its content."""

    path: Path | None = None
    content: dict[str, Any] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the checkpoints of a run except the best, newest first."""
    return [path for path, name in _files(directory) if name.kind == CHECKPOINT]


def best_file(directory: Path) -> Path | None:
    """Return the best checkpoint of a run, or None."""
    return next((path for path, name in _files(directory) if name.kind == BEST), None)


def newest_good(
    directory: Path, library: TensorLibrary, later_than: tuple[int, int] = NO_POSITION
) -> LoadedCheckpoint:
    """Read the newest checkpoint that is not damaged, which may be the best one (rank 0 only)."""
    found = LoadedCheckpoint()
    for path, name in _files(directory):
        if name.position <= later_than:
            break
        try:
            return replace(found, path=path, content=load_checkpoint(path, library))
        except UsageError as error:
            found.bad.append(str(error))
    return found


def mark_best(path: Path) -> Path:
    """Give a checkpoint the name of the best one as well, and remove the best one before it."""
    name = CheckpointName.of(path)
    assert name is not None
    best = path.with_name(str(replace(name, kind=BEST)))
    try:
        os.link(path, best)
    except FileExistsError:
        pass
    except OSError:  # not every file system has hard links
        with replacing(best) as copy, open(path, "rb") as source:
            shutil.copyfileobj(source, copy)
    for other, named in _files(path.parent):
        if named.kind == BEST and other != best:
            other.unlink()
    return best


def remove_old(written: Path, keep: int) -> None:
    """Remove all but the last checkpoints, once a new one is on the disk.

    Checkpoints later than the new one are removed as well: they were damaged, and the run was
    resumed from one before them.
    """
    name = CheckpointName.of(written)
    assert name is not None
    files = _files(written.parent)
    before = [
        path for path, other in files if other.kind == CHECKPOINT and other.position < name.position
    ]
    kept = {written, *before[: keep - 1]}
    for path, other in files:
        if path not in kept and (other.kind == CHECKPOINT or other.position > name.position):
            path.unlink()


def _files(directory: Path) -> list[tuple[Path, CheckpointName]]:
    """Return all checkpoints, newest first; the best one follows one at the same position."""
    try:
        named = [(path, CheckpointName.of(path)) for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(path, name) for path, name in named if name is not None]
    return sorted(
        found, key=lambda item: (item[1].position, item[1].kind, str(item[0])), reverse=True
    )


# Training has priority: at this niceness, writing gets a tenth of a busy core.
_NICENESS = 10


class Snapshot(Protocol):
    """The state at one moment."""

    def content(self) -> dict[str, Any]:
        """Return the content; waits until it is complete."""


class Checkpointable(Protocol):
    """State that can be saved."""

    tensor_library: TensorLibrary

    def snapshot(self) -> Snapshot:
        """Return the current state, which may change before the snapshot is complete."""


class Saver:
    """Writes checkpoints in the background, one after the other (rank 0 only).

    As a context manager it waits at the end for the checkpoint being written.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep
        self.newest: Path | None = None
        self._thread: threading.Thread | None = None
        self._problems: list[str] = []
        self._problem = ""
        self._fault: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()

    def save(
        self,
        epoch: int,
        samples: int,
        state: Checkpointable,
        about: Mapping[str, Any],
        best: bool = False,
    ) -> None:
        """Start writing a checkpoint of the current state.

        It first waits for an earlier one that is still being written, because it reuses its memory.
        """
        self.wait()
        content, snapshot = copy.deepcopy(dict(about)), state.snapshot()

        def write() -> None:
            content.update(snapshot.content())
            _lower_priority()
            path = write_checkpoint(self._directory, epoch, samples, content, state.tensor_library)
            self.newest = path
            report(f"{SAVED} {path}", os.environ)
            if best:
                mark_best(path)
            remove_old(path, self._keep)

        # Not a daemon: a rank that exits still completes the file.
        self._thread = threading.Thread(target=self._run, args=(write,), name="hvdtrain-saver")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint being written; problems() returns a failure."""
        self._join()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def problems(self) -> list[str]:
        """Return what could not be written since the last call, one line each."""
        found, self._problems = self._problems, []
        return found

    def finish(self) -> Path | None:
        """Wait for the checkpoint being written, and return the newest one."""
        self.wait()
        if self._problem:
            raise UsageError(self._problem)
        return self.newest

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, write: Any) -> None:
        self._problem = ""
        try:
            write()
        except OSError as error:
            where = error.filename or self._directory
            state = (
                f"the newest is {self.newest.name}" if self.newest else "there is none before it"
            )
            self._problem = (
                f"a checkpoint of {where} could not be written ({error.strerror or error}): "
                f"{state}. Make room there, or name another directory with --out"
            )
            self._problems.append(self._problem)
        except BaseException as error:
            self._fault = error


def _lower_priority() -> None:
    """Lower the priority of this thread, which ends soon."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError:  # a limit forbids it
        pass
