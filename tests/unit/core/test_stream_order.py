"""Nothing on a device happens before what it needs."""

import os
import subprocess
import sys
from pathlib import Path

from paths import HELPERS

# In a process of its own: torch keeps a device for as long as it lives.
CASES = Path(__file__).parent / "stream_order_cases.py"


def test_everything_waits_for_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, str(CASES)],
        env={"PYTHONPATH": os.pathsep.join(map(str, HELPERS))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
