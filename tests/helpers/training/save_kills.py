"""Kills this process at a moment of its saving that a variable names: KILL="WAY:NUMBER:SECONDS".

The ways, of which "start" and "any" use SECONDS:

- start: so many seconds after it has opened its first temporary file
- save: within the NUMBERth checkpoint of this process, of which a part has been written
- saved: when the checkpoint of an epoch has its name
- removes: before that removes another one
- marked: when the best checkpoint has its name
- any: so many seconds after NUMBER checkpoints, and at the latest two checkpoints later
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

from hvdtrain.train.checkpoint import file as checkpoint_file
from hvdtrain.train.checkpoint.file import BEST, CHECKPOINT, CheckpointName

# The files that a start writes are smaller, and each checkpoint is larger.
LEAST_BYTES = 100_000


def arrange() -> None:
    """Have this process be killed, if the variable is there."""
    if asked := os.environ.pop("KILL", ""):
        way, number, seconds = asked.split(":")
        _Kill(way, int(number), float(seconds))


class _Kill:
    def __init__(self, way: str, number: int, seconds: float) -> None:
        self._way, self._number, self._seconds = way, number, seconds
        self._saved, self._epoch_saved = 0, False
        module: Any = checkpoint_file
        plain, saves = module.write, count(1)

        def write(file: Any, *content: Any) -> str:
            halfway = way == "save" and next(saves) == number
            taken: Any = _Half(file) if halfway else file
            digest: str = plain(taken, *content)
            return digest

        module.write = write
        self._after("replace", self._replaced)
        self._after("link", self._linked)
        unlink = os.unlink

        def unlinking(path: Any, **how: Any) -> None:
            self._unlinks(Path(path))
            unlink(path, **how)

        os.unlink = unlinking
        sys.addaudithook(self._heard)
        if way == "any" and number == 0:
            self._soon()

    def _after(self, name: str, act: Any) -> None:
        plain = getattr(os, name)

        def acting(source: Any, target: Any, **how: Any) -> None:
            plain(source, target, **how)
            act(Path(target))

        setattr(os, name, acting)

    def _replaced(self, path: Path) -> None:
        name = CheckpointName.of(path)
        if name is None or name.kind != CHECKPOINT:
            return
        self._saved += 1
        self._epoch_saved |= name.samples == 0
        if self._way == "saved" and self._epoch_saved:
            _die()
        if self._way == "any" and self._saved == self._number:
            self._soon()
        if self._way == "any" and self._saved == self._number + 2:
            _die()

    def _linked(self, path: Path) -> None:
        name = CheckpointName.of(path)
        if self._way == "marked" and name is not None and name.kind == BEST:
            _die()

    def _unlinks(self, path: Path) -> None:
        if self._way == "removes" and self._epoch_saved and CheckpointName.of(path) is not None:
            _die()

    def _heard(self, event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and self._way == "start" and ".unfinished-" in str(details[0]):
            self._way = ""
            self._soon()

    def _soon(self) -> None:
        timer = threading.Timer(self._seconds, _die)
        timer.daemon = True
        timer.start()


class _Half:
    """A file of a checkpoint that ends its process when a part has been written."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, LEAST_BYTES

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._left -= len(data)
        if self._left <= 0:
            self._file.flush()
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
