"""hvdtrain.torch's operations at 1 to 4 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "torch_ops_worker.py"


@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_operations(np: int) -> None:
    assert run_ranks(WORKER, np).results == [[rank, np] for rank in range(np)]


def test_operations_on_gloo() -> None:
    done = run_ranks(WORKER, 3, env={"HVDTRAIN_ENGINE": "gloo"}, timeout_seconds=90)
    assert done.results == [[rank, 3] for rank in range(3)]


def test_without_a_launcher() -> None:
    code = (
        "import hvdtrain.torch as hvd, torch; hvd.init();"
        "print(hvd.rank(), hvd.size(), hvd.allreduce(torch.tensor([2.0])).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 2.0\n", "")


def test_before_init() -> None:
    code = "import hvdtrain.torch as hvd; hvd.rank()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "NotInitializedError: hvdtrain is not initialized: call init() first" in done.stderr
