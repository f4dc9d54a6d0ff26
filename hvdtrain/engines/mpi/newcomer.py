"""The program of a process that joins ranks which are at work.

It initializes MPI at once, so that the rank that has started it notices if it ends, and then runs
what the other ranks run.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from hvdtrain.collective import collective
from hvdtrain.engines.mpi.engine import initialize, load_mpi


@collective
def main(words: Sequence[str]) -> None:
    """Meet the rank that has started this process, and run a module or a file as Python does."""
    initialize(load_mpi(), os.environ)
    from hvdtrain.engines.mpi.joining import is_joining, meet_starter

    meet_starter()
    try:
        _run(words)
    except BaseException as error:
        if not is_joining():
            raise
        # The others continue, and any other exit code would become that of the job.
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _run(words: Sequence[str]) -> None:
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
