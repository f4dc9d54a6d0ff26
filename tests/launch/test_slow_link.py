"""benchmarks/slow_link.sh gives a command two hosts with a slow link between them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import start

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "slow_link.sh"
# One rank of each host sends 4 MiB, which takes 34 ms at 1 Gbit/s.
SEND = """
import socket, time
from mpi4py import MPI
import numpy as np
world = MPI.COMM_WORLD
data = np.zeros(4 << 20, np.uint8)
hosts = world.allgather(socket.gethostname())
world.Barrier()
started = time.perf_counter()
if world.rank == 0:
    world.Send(data, 3)
if world.rank == 3:
    world.Recv(data, 0)
    print(",".join(hosts), time.perf_counter() - started)
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_two_hosts_and_a_slow_link() -> None:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, and ip and tc of iproute2")
    before = namespaces()
    python = Path(sys.executable)
    words = [python.with_name("mpirun"), "--bind-to", "none", "-np", 4, "-hostfile", "HOSTS"]
    done = start([SCRIPT, *words, python, "-c", SEND]).end(code=0)
    hosts, seconds = done.stdout.split()
    assert hosts == "nodea,nodea,nodeb,nodeb"
    assert float(seconds) > 0.02
    assert namespaces() == before
