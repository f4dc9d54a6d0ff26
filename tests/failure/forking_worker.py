"""Starts `python -m hvdtrain` again and again without the seconds that the imports take.

For each line of stdin, a JSON list of arguments, the file for the output and when the process is to
kill itself (see save_kills.py), it forks a process that does what `python -m hvdtrain` does, and
says in a line how it ended.
"""

from __future__ import annotations

import json
import os
import sys

# A fork has the thread that forked and no other: torch must not have started any.
os.environ["OMP_NUM_THREADS"] = "1"

import torch._dynamo  # noqa: F401
from save_kills import arrange

from hvdtrain.cli.main import main


def run(arguments: list[str], output: str, kill: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ["KILL"] = kill
    arrange()
    main(arguments)


if __name__ == "__main__":
    assert len(os.listdir("/proc/self/task")) == 1
    for line in sys.stdin:
        process = os.fork()
        if not process:
            run(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
