"""Saving in the background: it waits, fails and is stopped; nothing half done is ever used."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoints import (
    Saver,
    TensorLibrary,
    best_file,
    checkpoint_files,
    newest_good,
)

# A limit that only ends a hang.
HANGS_AFTER_SECONDS = 300


@dataclass
class State:
    value: Any
    ready: threading.Event = field(default_factory=threading.Event)
    tensor_library: TensorLibrary = "np"

    def __post_init__(self) -> None:
        self.ready.set()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return what is complete when the test says so."""
        value = self.value

        def content() -> dict[str, Any]:
            assert self.ready.wait(HANGS_AFTER_SECONDS)
            return {"model": {"w": value}}

        return content


def test_it_returns_at_once_and_writes_in_the_background(tmp_path: Path) -> None:
    state = State(np.arange(3))
    state.ready.clear()
    saver = Saver(tmp_path, keep=2)
    about = {"epoch": 1, "part": [1]}
    saver.save(1, 0, state, about, best=True)
    about["part"].append(2)  # type: ignore[attr-defined]
    assert saver.newest is None
    state.ready.set()
    newest = saver.finish()
    assert checkpoint_files(tmp_path) == [newest]
    assert best_file(tmp_path) is not None
    content = newest_good(tmp_path, "np").content
    assert (content["epoch"], content["part"]) == (1, [1])
    assert content["model"]["w"].tolist() == [0, 1, 2]
    assert saver.problems() == []


def test_the_next_one_waits_for_the_last_one(tmp_path: Path) -> None:
    """The memory of a snapshot is used again: the next may not be taken before it is written."""
    seen = []

    class Looking(State):
        def snapshot(self) -> Callable[[], dict[str, Any]]:
            seen.append(len(checkpoint_files(tmp_path)))
            return super().snapshot()

    with Saver(tmp_path, keep=2) as saver:
        for epoch in range(1, 5):
            saver.save(epoch, 0, Looking(np.zeros(100_000)), {"epoch": epoch})
    assert seen == [0, 1, 2, 2]
    assert newest_good(tmp_path, "np").content["epoch"] == 4


def test_a_failure_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    directory.mkdir()
    saver = Saver(directory, keep=2)
    saver.save(1, 0, State(np.zeros(3)), {"epoch": 1})
    first = saver.finish()
    assert first is not None
    directory.rename(elsewhere)
    saver.save(2, 0, State(np.zeros(3)), {"epoch": 2})
    saver.wait()
    (problem,) = saver.problems()
    assert str(directory) in problem
    assert "could not be written (No such file or directory)" in problem
    assert first.name in problem
    assert saver.problems() == []
    with pytest.raises(UsageError, match="could not be written"):
        saver.finish()
    elsewhere.rename(directory)
    saver.save(3, 0, State(np.zeros(3)), {"epoch": 3})
    assert saver.finish() in checkpoint_files(directory)


def test_what_cannot_be_kept_is_an_error_of_the_program(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    saver.save(1, 0, State({1, 2}), {"epoch": 1})
    with pytest.raises(TypeError, match="model/w is a set"):
        saver.finish()
    assert list(tmp_path.iterdir()) == []


SAVING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint_saver import Saver, State, np
Saver(Path(sys.argv[1]), keep=2).save(1, 0, State(np.zeros(8 << 20)), {"epoch": 1})
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(7)", 7),
        ("import signal; signal.signal(15, lambda *_: sys.exit(9)); signal.raise_signal(15)", 9),
    ],
)
def test_an_exit_while_it_writes_ends_with_a_whole_file(
    tmp_path: Path, end: str, code: int
) -> None:
    command = [sys.executable, "-c", SAVING + end, str(tmp_path), str(Path(__file__).parent)]
    assert subprocess.run(command, timeout=HANGS_AFTER_SECONDS).returncode == code
    found = newest_good(tmp_path, "np")
    assert (found.bad, found.content["model"]["w"].shape) == ([], (8 << 20,))
    assert list(tmp_path.glob(".unfinished-*")) == []
