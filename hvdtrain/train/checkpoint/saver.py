"""Writes checkpoints in a thread while training goes on."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint.directory import mark_best, remove_old
from hvdtrain.train.checkpoint.file import write_checkpoint
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary

__all__ = ["Checkpointable", "Saver", "Snapshot"]

# Training comes first, and writing takes what it leaves: a tenth of a core that is busy.
_NICENESS = 10


class Snapshot(Protocol):
    """What a state was at one moment."""

    def content(self) -> dict[str, Any]:
        """Return it; waits until it is complete."""


class Checkpointable(Protocol):
    """What can be saved.

    Attributes:
        tensor_library: library of its tensors.
    """

    tensor_library: TensorLibrary

    def snapshot(self) -> Snapshot:
        """Return what the state is now; it may change before the snapshot is complete."""


class Saver:
    """Writes checkpoints in the background, one after the other (rank 0 only).

    As a context manager it waits at the end for what is being written.

    Args:
        directory: of the run; it exists.
        keep: how many checkpoints stay, beside the best one.

    Attributes:
        newest: the last checkpoint that was written whole; None before.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
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
        """Begin to write a checkpoint of the state as it is now (local).

        An earlier one that is still being written is waited for, since its memory is used again.

        Args:
            epoch: epochs done.
            samples: done of the next one.
            state: what a snapshot is taken of.
            about: what else is to be in the checkpoint; "epoch" is.
            best: whether it is the best one so far.

        Raises:
            TypeError: an earlier one had something in it that a checkpoint does not hold.
        """
        self.wait()
        content, snapshot = copy.deepcopy(dict(about)), state.snapshot()

        def write() -> None:
            content.update(snapshot.content())
            _give_way()
            path = write_checkpoint(self._directory, epoch, samples, content, state.tensor_library)
            self.newest = path
            if best:
                mark_best(path)
            remove_old(path, self._keep)

        # Not a daemon: a rank that exits writes to the end.
        self._thread = threading.Thread(target=self._try, args=(write,), name="hvdtrain-saver")
        self._thread.start()

    def wait(self) -> None:
        """Wait for what is being written (local); a failure is kept for problems().

        Raises:
            TypeError: there was something in it that a checkpoint does not hold.
        """
        self._join()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def problems(self) -> list[str]:
        """Return what could not be written since the last call, one line each (local)."""
        found, self._problems = self._problems, []
        return found

    def finish(self) -> Path | None:
        """Wait for what is being written, and return the newest checkpoint (local).

        Raises:
            UsageError: the last one could not be written.
        """
        self.wait()
        if self._problem:
            raise UsageError(self._problem)
        return self.newest

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try(self, write: Any) -> None:
        self._problem = ""
        try:
            write()
        except OSError as error:
            where = error.filename or self._directory
            left = f"the newest is {self.newest.name}" if self.newest else "there is none before it"
            self._problem = (
                f"a checkpoint of {where} could not be written ({error.strerror or error}): {left}"
            )
            self._problems.append(self._problem)
        except BaseException as error:
            self._fault = error


def _give_way() -> None:
    """Let other threads go first; this one ends soon."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError:  # it has been given a limit
        pass
