"""Jobs go on, and end well, though operations were left unfinished."""

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "torch_lifecycle_worker.py"


@pytest.mark.parametrize(
    ("np", "env"), [(3, {"POLLING_SECONDS": "1.5"}), (2, {"HVDTRAIN_SHARED_MEMORY": "0"})]
)
def test_what_is_left_unfinished(np: int, env: dict[str, str]) -> None:
    done = run_ranks(WORKER, np, env=env, timeout_seconds=300)
    left = "left without it. Let every rank submit the same operations before it leaves"
    for what in ("optimizer step", "allreduce 'of rank 0'", "allreduce 'at the end'"):
        lines = [line for line in done.stderr.splitlines() if f"[rank 0/{np}] {what}" in line]
        assert len(lines) == 1, done.stderr
        assert left in lines[0]


def test_what_is_left_unfinished_without_threads_of_mpi() -> None:
    run_ranks(WORKER, 2, env={"MPI4PY_RC_THREAD_LEVEL": "serialized"}, timeout_seconds=300)
