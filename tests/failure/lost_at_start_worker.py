"""Rank 1 of three ends before MPI has started on it, while the others wait in init()."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import hvdtrain.torch as hvd


def main() -> None:
    rank, folder = os.environ["OMPI_COMM_WORLD_RANK"], Path(sys.argv[2])
    if rank != "1":
        (folder / rank).touch()
        hvd.init()
        return
    while len(list(folder.iterdir())) < 2 + (sys.argv[1] == "exits when told"):
        time.sleep(0.01)
    if sys.argv[1] != "is killed":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
