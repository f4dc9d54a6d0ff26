"""What befalls a rank: it is killed, leaves, is stopped for a while, or is cut off from others."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from newcomers import JOINED

from hvdtrain.core import context

# Ways that leave the rank alive, for longer than it takes to notice one that has ended.
PAUSES = ("stop", "hold")
PAUSE_SECONDS = 1.5
# Not before the process has stopped, however late it does so: nobody would wake it.
_WAKE = f"""
import os, pathlib, sys, time
stat = pathlib.Path("/proc", sys.argv[1], "stat")
while stat.read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
time.sleep({PAUSE_SECONDS})
os.kill(int(sys.argv[1]), 18)
"""


def disturb(way: str) -> None:
    if way in PAUSES:
        print(f"disturbed: {way}", flush=True)
    match way:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os.kill(os.getpid(), signal.SIGUSR2)
        case "ask":  # all to stop
            os.kill(os.getpid(), signal.SIGUSR1)
        case "stop":
            waking = subprocess.Popen([sys.executable, "-c", _WAKE, str(os.getpid())])
            os.kill(os.getpid(), signal.SIGSTOP)
            waking.wait()
        case "hold":
            # Functions of a PyDLL keep the lock, as a long pass of the garbage collector does.
            ctypes.PyDLL(None).usleep(int(PAUSE_SECONDS * 1e6))
        case "cut":
            _cut()
        case _:
            raise ValueError(way)


def _cut() -> None:
    """Close the connections of MPI to ranks on other hosts; mpirun's are on the loopback."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            if not connection.getpeername()[0].startswith("127."):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


JOIN_SECONDS = 240

# Moments that every rank reaches in each step without waiting for a rank that has come to them.
OF_STEPS = ("forward", "backward", "update")


class Killed:
    """Counts moments of this process, and disturbs it: KILLS="RANK:NUMBER:MOMENT[:WAY] ...".

    RANK is "new" for processes that have joined. WAY is one of disturb(), "kill" by default. Where
    TOGETHER names a folder, a rank is killed in a step when all ranks have come to that moment:
    else the end of one that is ahead may break off the step before on the others. That is left to
    chance where the world has the size again that another one had.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        own = "new" if JOINED else os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        again = os.environ.get("HVDTRAIN_RESTARTS", "0") != "0"
        kills = [kill.split(":") for kill in os.environ.get("KILLS", "").split() if not again]
        self.ways = {
            (int(number), moment): way[0] if way else "kill"
            for rank, number, moment, *way in kills
            if rank == own
        }
        self.folder = os.environ.get("TOGETHER", "")
        self.noted = {(int(number), moment) for _, number, moment, *_ in kills}

    def at(self, moment: str) -> None:
        self.counts[moment] = self.counts.get(moment, 0) + 1
        here = self.counts[moment], moment
        way = self.ways.get(here)
        if self.folder and here in self.noted:
            self._meet(f"{here[0]} {moment}", moment in OF_STEPS, way == "kill")
        if way is not None:
            disturb(way)

    def _meet(self, moment: str, waits: bool, ends: bool) -> None:
        """Tell that this rank has come to a moment; one that ends may wait until all have."""
        world = context.current().topology
        names = [f"{rank} of {world.size}" for rank in range(world.size)]
        Path(self.folder, f"{moment} {names[world.rank]}").touch()
        deadline = time.monotonic() + JOIN_SECONDS
        # Without one that has ended, others may not come to it.
        while ends and waits and not self._told("end", names, any):
            if self._told(moment, names, all):
                break
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if ends:
            Path(self.folder, f"end {names[world.rank]}").touch()

    def _told(
        self, what: str, names: Sequence[str], these: Callable[[Iterable[bool]], bool]
    ) -> bool:
        return these(Path(self.folder, f"{what} {name}").exists() for name in names)
