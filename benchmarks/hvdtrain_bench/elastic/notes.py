"""What the jobs train, and the notes that their processes leave when they are killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS = 3
BATCH = 32  # samples of each rank
STEPS = 120  # of three ranks, in one epoch
SAMPLES = RANKS * BATCH * STEPS


WORLD, BEGIN, END = "world", "begin", "end"
# What happened, when by the clock that all processes of a host share, and more.
Note = dict[str, Any]


class Notes:
    def __init__(self, folder: Path) -> None:
        path = folder / f"{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, event: str, **values: Any) -> None:
        line: Note = {"event": event, "at": time.monotonic(), **values}
        os.write(self._file, f"{json.dumps(line)}\n".encode())

    def world(self, generation: int, done: int | None) -> None:
        """Note that a world begins after so many others, and after so many samples, if known."""
        self.add(WORLD, generation=generation, done=done)

    def begin(self, samples: Sequence[int]) -> None:
        """Note the samples of this process in the step that begins."""
        self.add(BEGIN, samples=list(samples))

    def end(self) -> None:
        """Note that the step has ended: the weights are updated."""
        self.add(END)


def read_notes(folder: Path) -> dict[int, list[Note]]:
    """Return the notes of each process by its number, in their order."""
    found: dict[int, list[Note]] = {}
    for path in folder.glob("*.jsonl"):
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        found[int(path.stem)] = [json.loads(line) for line in whole.splitlines()]
    return found
