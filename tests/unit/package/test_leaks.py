"""The check that a test leaves nothing behind finds each kind of leak."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from leaks import Snapshot, leaks, restore

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# As long as a process or a thread may take to end: it takes no time where it has.
PATIENCE_SECONDS = 120.0
# Its parent ends at once, so that nobody but the mark in its environment tells whose it is.
ORPHAN = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=subprocess.DEVNULL)\n"
    "print(child.pid)"
)


def test_nothing_is_no_leak() -> None:
    before = Snapshot.take()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert leaks(before, PATIENCE_SECONDS) == []


def test_variables_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED", "1")
    monkeypatch.setenv("REMOVED", "1")
    before = Snapshot.take()
    os.environ["ADDED"] = os.environ["CHANGED"] = "2"
    del os.environ["REMOVED"]
    os.chdir(tmp_path)
    found = leaks(before, 0.0)
    restore(before)
    assert found == [
        "variable ADDED",
        "variable CHANGED",
        "variable REMOVED",
        f"working directory {tmp_path}",
    ]
    assert leaks(before, 0.0) == []


def test_a_thread_is_given_time_and_then_reported() -> None:
    before, end = Snapshot.take(), threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    found = leaks(before, 0.1)
    threading.Timer(0.1, end.set).start()
    assert found == ["thread forgotten"]
    assert leaks(before, PATIENCE_SECONDS) == []
    thread.join()


def test_a_child_is_reported_and_ended() -> None:
    before = Snapshot.take()
    with subprocess.Popen(SLEEP) as child:
        found = leaks(before, 0.1)
        restore(before)
        assert child.wait(PATIENCE_SECONDS) != 0
    assert len(found) == 1
    assert f"process {child.pid}: " in found[0]


def test_an_orphan_is_reported_and_ended() -> None:
    before = Snapshot.take()
    done = subprocess.run([sys.executable, "-c", ORPHAN], check=True, stdout=subprocess.PIPE)
    found = leaks(before, 0.1)
    restore(before)
    assert [line.split(":")[0] for line in found] == [f"process {int(done.stdout)}"]
    assert leaks(before, PATIENCE_SECONDS) == []
