"""Ranks that reduce numbers until rank 1, or what the first argument says, ends the job."""

import faulthandler
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from job import rank_of

from hvdtrain.buffer import Buffer
from hvdtrain.core import context, operations
from hvdtrain.types import ReduceOp

LONG_SECONDS = 600
STEPS = 8
DIES_AT = 5


def reduce(name: str, count: int = 1) -> None:
    ones = Buffer.from_array(np.ones(count))
    operations.allreduce(context.current().world, [ones], [(count,)], ReduceOp.SUM, name).run()


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    faulthandler._sigsegv()  # type: ignore[attr-defined]


def raises() -> None:
    raise ValueError("the planted error")


def raises_everywhere() -> None:
    raise ValueError("the planted error")


def exits_with_3() -> None:
    os._exit(3)


def exits() -> None:
    sys.exit(0)


def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LONG_SECONDS)


def all_wait() -> None:
    print("waiting", flush=True)
    time.sleep(LONG_SECONDS)


def stalls() -> None:
    time.sleep(LONG_SECONDS)


def differs() -> None:
    reduce("loss", 2)


def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(LONG_SECONDS)


def recurses() -> None:
    recurses()


def memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
    bytearray(1 << 30)


def outgrows_its_group() -> None:
    Path(os.environ["SMALL_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    np.ones(1 << 26)  # 512 MiB


def fills_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, -1))
    Path("checkpoint").write_bytes(bytes(1 << 20))


def imports() -> None:
    importlib.import_module("no_such_module")


EVERYWHERE: tuple[Callable[[], None], ...] = (raises_everywhere, all_wait)


def main(name: str) -> None:
    own = rank_of(os.environ)
    if own == 1 and name == "before_init":
        killed()
    if own == 1 and name == "import_before_init":
        imports()
    if own == 1 and name == "in_init":
        context.check_world_size = lambda world: killed()
    context.init()
    death = globals().get(name, killed)
    for step in range(STEPS):
        if step == DIES_AT and "last" not in name and (own == 1 or death in EVERYWHERE):
            death()
        reduce("loss")
    if own == 1:
        killed()  # after the last step


if __name__ == "__main__":
    main(sys.argv[1])
