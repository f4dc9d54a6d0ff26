"""Data-loader workers and other children are no ranks."""

from pathlib import Path

from ranks import launch, run_ranks

WORKER = Path(__file__).parent / "loader_worker.py"


def test_workers_of_a_data_loader() -> None:
    done = run_ranks(WORKER, 2)
    assert "[rank" not in done.stderr


def test_init_at_the_top_level_of_a_script_that_spawns() -> None:
    done = launch(WORKER, 2, args=["unguarded"]).end()
    assert done.returncode != 0
    assert "init() in a multiprocessing child, which is not a rank of its own" in done.stderr
    assert "under `if __name__ == '__main__':`" in done.stderr


def test_a_fork_is_no_rank() -> None:
    code = """
import os, sys
import hvdtrain.torch as hvd
hvd.init()
if os.fork() == 0:
    assert not hvd.is_initialized()
    try:
        hvd.rank()
    except RuntimeError as error:
        assert "forked child" in str(error)
    else:
        raise AssertionError("rank() of a process that is no rank")
    sys.exit(0)
assert os.wait()[1] == 0
hvd.barrier()
"""
    run_ranks(["-c", code], 2)
