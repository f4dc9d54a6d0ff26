"""benchmarks/slow_link.sh gives a command two hosts with a slow link between them."""

import json
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
# What the host of a rank has sent, in bytes, when all ranks are here.
SENT = """
import json, sys
from pathlib import Path
import torch
import hvdtrain.torch as hvd

def sent():
    hvd.barrier()
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (card,) = [line.split(":")[1] for line in lines if line.strip().startswith("hvd0:")]
    return int(card.split()[8])
"""
STEPS = """
hvd.init()
found = {}
for exchange in sys.argv[1:]:
    weight = torch.nn.Parameter(torch.zeros(1024, 1024))
    sgd = torch.optim.SGD([weight], lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, [("weight", weight)], exchange=exchange)
    before = 0
    for step in range(8):  # the first ones also compare the weights, and open connections
        if step == 4:
            before = sent()
        optimizer.zero_grad()
        (weight * torch.randn(1024, 1024)).sum().backward()
        optimizer.step()
    found[exchange] = (sent() - before) / 4
if hvd.rank() == 0:
    print(json.dumps(found), flush=True)
"""
SERVED = """
from hvdtrain.train import fit

hvd.init()
before = sent()
summary = fit("digits", strategy="ps:servers=1", epochs=1, out=sys.argv[1])
after = sent()
if hvd.rank() == 0:
    print("sent", (after - before) / summary.steps, flush=True)
"""
# Of a step with 4 MiB of gradients, in MiB: each host sends half of what a ring of two would.
EXCHANGES = {
    "average": 4.0,
    "half:type=bf16": 2.0,
    "nbit:bits=1": 4 / 32 + 4 * 8 / 4 / 512,
    "nbit:bits=8": 1 + 4 * 8 / 4 / 512,
    "powersgd:rank=4": 2 * 4 * 4 / 1024,
    "blockmomentum:steps=4": 1.0,
}


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


@pytest.mark.soak
def test_bytes_between_hosts(tmp_path: Path) -> None:
    """Beside the numbers: headers of TCP, and messages by which ranks agree."""
    env = {"RATE": "10gbit", "SLOTS": 1}
    done = between_hosts(4, "-c", SENT + STEPS, *EXCHANGES, env={"RATE": "10gbit"})
    found = {exchange: sent / 2**20 for exchange, sent in json.loads(done.stdout).items()}
    for exchange, expected in EXCHANGES.items():
        assert expected <= found[exchange] <= 1.1 * expected + 0.02, found
    done = between_hosts(2, "-c", SENT + SERVED, tmp_path / "run", env=env)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("sent")]
    assert 4 * 38_282 <= float(line.split()[1]) <= 1.1 * 4 * 38_282  # a gradient of the worker
