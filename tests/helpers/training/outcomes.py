"""What comes of commands of hvdtrain, which one process runs: to start it takes the longest."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from job import Completed
from paths import TRAINING
from ranks import run_ranks, start

_WORKER = TRAINING / "commands_worker.py"


def outcomes(
    commands: Sequence[Sequence[object]], cwd: Path, np: int = 0, **how: Any
) -> list[Completed]:
    """Return the code and the output of each command; of `np` ranks only the first one speaks."""
    words = json.dumps([list(map(str, command)) for command in commands])
    if np:
        results = run_ranks(_WORKER, np, args=[words], cwd=cwd, **{"warm": "torch", **how}).results
    else:
        with start([sys.executable, _WORKER, words], cwd=cwd) as job:
            done = job.ended()
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            results = job.results(1)
    first, *others = results
    for other in others:
        assert [result["code"] for result in other] == [result["code"] for result in first]
        assert {result["out"] for result in other} == {""}
        assert "hvdtrain:" not in "".join(result["err"] for result in other)
    return [Completed(result["code"], result["out"], result["err"], 0.0) for result in first]
