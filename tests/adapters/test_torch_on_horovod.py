"""hvdtrain.torch's operations on the engine that Horovod's core serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from horovod_environment import horovod_python
from ranks import run_ranks

WORKER = Path(__file__).parent / "torch_ops_worker.py"


@pytest.mark.horovod
def test_operations_on_horovod() -> None:
    env = {"HVDTRAIN_ENGINE": "horovod"}
    done = run_ranks(WORKER, 2, python=horovod_python(), env=env, timeout_seconds=120)
    assert done.results == [[0, 2], [1, 2]]
    assert done.stderr == ""
