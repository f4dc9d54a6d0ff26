"""What befalls a rank: it is killed, leaves, is stopped for a while, or is cut off from others."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

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
