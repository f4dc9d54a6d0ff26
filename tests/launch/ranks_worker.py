"""A rank that does what its first argument says: misbehaves, waits, or tells what it was given."""

import os
import signal
import sys
import time

from ranks import report

GIVEN = ("GREETING", "INHERITED", "NCCL_SOCKET_IFNAME", "PMIX_SERVER_TMPDIR")


def main() -> None:
    behaviour = sys.argv[1]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
    write(1, f"rank {rank} of {size} is here")
    if rank == size - 1:
        misbehave(behaviour)
    if behaviour == "waits for a signal":
        # No handler: one whose signal comes just before sleep() runs after it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        write(1, f"rank {rank} waits")
        signal.sigwait([signal.SIGUSR1])
        write(1, f"rank {rank} has SIGUSR1")
        time.sleep(3600)
    if behaviour.endswith("one that waits"):
        time.sleep(3600)
    if behaviour == "tells":
        write(2, f"rank {rank} warns")
    given = {name: os.environ.get(name) for name in GIVEN}
    cores = len(os.sched_getaffinity(0))
    payload = {"rank": rank, "size": size, "argv": sys.argv[1:], "given": given, "cores": cores}
    report(cases=1, payload=payload)


def write(stream: int, text: str) -> None:
    """Write a line in one piece, or the launcher may put another rank's output between."""
    os.write(stream, f"{text}\n".encode())


def misbehave(behaviour: str) -> None:
    if behaviour == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour.startswith("leaves a child") and os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, 256)  # Hydra waits for the end of its own pipe
        time.sleep(3600)
    if "exits 3" in behaviour:
        sys.exit(3)


main()
