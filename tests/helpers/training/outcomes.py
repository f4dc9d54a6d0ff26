"""What comes of commands of hvdtrain, which one process runs: to start it takes the longest."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from job import Completed
from paths import TRAINING
from ranks import start


def outcomes(commands: Sequence[Sequence[object]], cwd: Path) -> list[Completed]:
    """Return the code and the output of each command, one after the other."""
    words = json.dumps([list(map(str, command)) for command in commands])
    with start([sys.executable, TRAINING / "commands_worker.py", words], cwd=cwd) as job:
        done = job.ended()
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        (results,) = job.results(1)
    return [Completed(result["code"], result["out"], result["err"], 0.0) for result in results]
