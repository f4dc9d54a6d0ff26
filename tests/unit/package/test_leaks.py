"""The check that a test leaves nothing behind finds what was left."""

import subprocess
import sys

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


def test_an_orphan_is_reported_and_ended() -> None:
    before = Snapshot.take()
    done = subprocess.run([sys.executable, "-c", ORPHAN], check=True, stdout=subprocess.PIPE)
    found = leaks(before, 0.1)
    restore(before)
    assert [line.split(":")[0] for line in found] == [f"process {int(done.stdout)}"]
    assert leaks(before, PATIENCE_SECONDS) == []
