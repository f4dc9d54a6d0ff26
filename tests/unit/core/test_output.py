"""What a rank prints last is read before the job is aborted."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

ABORTING = """
import os, sys
from hvdtrain.core.process import output
from hvdtrain.core.process.exits import ExitGuard
from hvdtrain.topology import Topology

descriptor, output._LONGEST_SECONDS = int(sys.argv[1]), float(sys.argv[2])

def abort(code):
    os.write(descriptor, b"aborted")
    os._exit(code)

ExitGuard(Topology.from_nodes(0, [0], ["here"]), lambda: None, abort).install()
raise ValueError("the reason")
"""


def test_an_abort_waits_until_its_reason_is_read() -> None:
    """As with an mpiexec that reads what ranks print after what they ask it to do."""
    told, tell = os.pipe()
    argv = [sys.executable, "-c", ABORTING, str(tell), "60"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, pass_fds=[tell]) as process:
        os.close(tell)
        assert process.stderr is not None
        first = os.read(process.stderr.fileno(), 1)  # blocks until there is something
        time.sleep(0.2)
        early = bool(select.select([told], [], [], 0)[0])
        rest = process.stderr.read()
    with os.fdopen(told, "rb") as file:
        assert file.read() == b"aborted"
    assert not early
    assert b"ValueError: the reason" in first + rest
    assert process.returncode == 1


@pytest.mark.parametrize("output", [subprocess.PIPE, None], ids=["unread", "closed"])
def test_an_abort_does_not_wait_for_ever(output: int | None) -> None:
    code = ABORTING if output else f"import os; os.close(1); os.close(2)\n{ABORTING}"
    argv = [sys.executable, "-c", code, str(os.open(os.devnull, os.O_WRONLY)), "0.1"]
    descriptor = int(argv[-2])
    with subprocess.Popen(argv, stdout=output, stderr=output, pass_fds=[descriptor]) as process:
        os.close(descriptor)
        assert process.wait(300) == 1


def test_the_reason_is_written_beside_torch_distributed() -> None:
    """Its hook holds back what the hooks before it write."""
    beside = ABORTING.replace(
        "raise",
        """import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise""",
    )
    argv = [sys.executable, "-c", beside, str(os.open(os.devnull, os.O_WRONLY)), "60"]
    ended = subprocess.run(argv, stderr=subprocess.PIPE, pass_fds=[int(argv[-2])], check=False)
    os.close(int(argv[-2]))
    assert ended.returncode == 1
    assert ended.stderr.count(b"ValueError: the reason") == 1
