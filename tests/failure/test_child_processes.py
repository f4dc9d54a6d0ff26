"""Data-loader workers and other children are no ranks."""

from pathlib import Path

import pytest
from ranks import launch, run_ranks

# Each sample says whether the process that made it is a rank, and whether it is in MPI.
LOADING = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import hvdtrain.torch as hvd
unguarded = "unguarded" in sys.argv
if unguarded:
    hvd.init()
class Probe(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        mpi = sys.modules.get("mpi4py.MPI")
        joined = mpi is not None and mpi.Is_initialized()
        return torch.tensor([index, hvd.is_initialized(), joined])
if __name__ == "__main__":
    hvd.init()
    for method in ("spawn",) if unguarded else ("fork", "spawn", "forkserver"):
        loader = DataLoader(Probe(), 2, num_workers=1, multiprocessing_context=method)
        batches = torch.cat(list(loader))
        # A fork inherits MPI, and must not use it; a process of its own must have none.
        assert batches.tolist() == [[index, 0, method == "fork"] for index in range(8)]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
"""
# What a child sees of weights after a step: without sharding it is the reverse.
WEIGHTS = """
import torch
import hvdtrain.torch as hvd
def answer(weight, pipe):
    while pipe.recv():
        pipe.send(weight.tolist())
if __name__ == "__main__":
    hvd.init()
    for method, seen in (("fork", -1.0), ("spawn", 1.0), ("forkserver", 1.0)):
        context = torch.multiprocessing.get_context(method)
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sharded=True)
        here, there = context.Pipe()
        child = context.Process(target=answer, args=(weight, there))
        child.start()
        here.send(True)
        assert here.recv() == [1.0] * 4
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
        assert weight.tolist() == [-1.0] * 4
        here.send(True)
        assert here.recv() == [seen] * 4
        here.send(False)
        child.join()
"""


# The children of the server would outlive their rank, and keep the launcher waiting.
KILLED = """
import os, signal, time
from multiprocessing import get_context, set_forkserver_preload
import hvdtrain.torch as hvd
if __name__ == "__main__":
    hvd.init()
    if PRELOADS:
        set_forkserver_preload(["json"])
    get_context("forkserver").Process(target=time.sleep, args=[900]).start()
    print("started", flush=True)
    hvd.barrier()
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loading.py"
    path.write_text(LOADING)
    return path


def test_workers_of_a_data_loader(script: Path) -> None:
    assert "[rank" not in run_ranks(script, 2, cases_expected=False).stderr


def test_weights_that_children_see(tmp_path: Path) -> None:
    path = tmp_path / "weights.py"
    path.write_text(WEIGHTS)
    run_ranks(path, 2, cases_expected=False)


@pytest.mark.parametrize("preloads", [False, True])
def test_children_of_a_fork_server_end_with_a_killed_rank(preloads: bool, tmp_path: Path) -> None:
    path = tmp_path / "killed.py"
    path.write_text(f"PRELOADS = {preloads}\n{KILLED}")
    done = launch(path, 2).end()
    assert done.returncode != 0
    assert done.stdout.count("started") == 2


def test_init_at_the_top_level_of_a_script_that_spawns(script: Path) -> None:
    done = launch(script, 2, args=["unguarded"]).end()
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
