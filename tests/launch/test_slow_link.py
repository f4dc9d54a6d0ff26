"""benchmarks/slow_link.sh gives a command two hosts with a slow link between them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from job import Completed
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


@pytest.fixture(autouse=True)
def two_hosts() -> Iterator[None]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, and ip and tc of iproute2")
    before = namespaces()
    yield
    assert namespaces() == before


def between_hosts(ranks: int, *words: object, env: Mapping[str, object] | None = None) -> Completed:
    python = Path(sys.executable)
    launcher = [python.with_name("mpirun"), "--bind-to", "none", "-x", "PYTHONPATH", "-np", ranks]
    return start([SCRIPT, *launcher, "-hostfile", "HOSTS", python, *words], env=env).end(code=0)


def test_two_hosts_and_a_slow_link() -> None:
    hosts, seconds = between_hosts(4, "-c", SEND).stdout.split()
    assert hosts == "nodea,nodea,nodeb,nodeb"
    assert float(seconds) > 0.02
