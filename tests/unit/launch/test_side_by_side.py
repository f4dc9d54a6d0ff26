"""Parts of a job: their GPUs, and how they end."""

import subprocess
import sys

from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.request import LaunchRequest
from hvdtrain.launch.side_by_side import divided

ENDS = """
import signal
from hvdtrain.errors import UsageError
from hvdtrain.launch.side_by_side import run_at_once

def refuses():
    raise UsageError("there is no such folder")

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(run_at_once([lambda: 3, refuses, lambda: 0]), signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def _gpus(ranks: int, masks: dict[str, str], *hosts: Host, share: bool = False) -> list[str | None]:
    request = LaunchRequest(("PROGRAM",), ranks=ranks, hosts=hosts)
    jobs = divided(request, ranks, 2, 8, masks, share)
    return [job.exports.get("CUDA_VISIBLE_DEVICES") for job in jobs]


def test_jobs_at_once_divide_the_gpus() -> None:
    masks = {"CUDA_VISIBLE_DEVICES": "5,6,7"}
    assert _gpus(6, masks) == ["5,6", "7,5", "6,7"]
    assert _gpus(4, {"CUDA_VISIBLE_DEVICES": "3"}) == ["3", "3"]
    assert _gpus(4, masks, Host("localhost", 4)) == ["5,6", "7,5"]
    assert _gpus(6, masks, Host("elsewhere", 4), Host("alone", 2)) == ["0,1", "2,3", None]
    assert _gpus(4, masks, Host("elsewhere", 4), share=True) == [None, None]


def test_ends_of_jobs_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout == "[3, 2, 0] set()\n"
    assert done.stderr == "hvdtrain: there is no such folder\n"
