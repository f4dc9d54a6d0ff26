"""The device of tests behaves as a GPU, and the host cannot read its memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

# In a process of its own: torch keeps a device for as long as it lives.
CASES = Path(__file__).parent / "hidden_device_cases.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(CASES), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_behaves_as_a_gpu() -> None:
    done = _run()
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_a_read_at_an_address_ends_the_process() -> None:
    done = _run("address")
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, ""), done.stderr
