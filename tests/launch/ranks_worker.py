"""A rank that misbehaves as its first argument says, for test_ranks_helper.py."""

from __future__ import annotations

import os
import signal
import sys
import time

from ranks import report


def main() -> None:
    behaviour = sys.argv[1]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
    print(f"rank {rank} of {size} is here", flush=True)
    if rank == size - 1:
        misbehave(behaviour)
    report(cases=1, payload={"rank": rank, "size": size, "cwd": os.listdir(), "argv": sys.argv[1:]})


def misbehave(behaviour: str) -> None:
    if behaviour == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "reports nothing":
        sys.exit(0)
    if behaviour == "has no case":
        report(cases=0)
        sys.exit(0)
    if behaviour == "sleeps":
        time.sleep(3600)
    if behaviour == "sleeps through SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if behaviour.startswith("leaves a child") and os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, 256)  # Hydra waits for the end of its own pipe
        time.sleep(3600)
    if behaviour.endswith("exits 3"):
        sys.exit(3)


main()
