"""Ranks that wait at their first start, before or after init(), and end well when started again."""

import os
import signal
import sys
import time

from ranks import report

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object


def main() -> None:
    first = os.environ["HVDTRAIN_RESTARTS"] == "0"
    if first and sys.argv[1] == "waits":
        time.sleep(600)
    if first and sys.argv[1] == "is killed" and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    context.init()
    if first and sys.argv[1] == "waits after init":
        print("waiting", flush=True)
        time.sleep(600)
    if sys.argv[1] == "raises" and context.current().topology.rank == 1:
        raise ValueError("as it was told to")
    ranks = allgather_object(context.current().topology.rank, "ranks")
    report(1, {"ranks": ranks, "hosts": context.current().topology.hostnames})


if __name__ == "__main__":
    main()
