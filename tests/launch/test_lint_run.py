"""`python -m hvdtrain lint --run`: two real ranks run a script, and are compared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.world import promised_world

START = """
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
# Ranks start from different weights, have the same samples, and one reduces alone.
WRONG = (
    START
    + """
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for number in range(100):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).square().mean()  # HVD902
    loss.backward()
    optimizer.step()  # HVD901
    alone = int(str(hvd.rank())) == 0 and number == 1
    sums = hvd.grouped_allreduce_async([loss.detach()]) if alone else None  # HVD903
    mean = hvd.synchronize(sums) if alone else loss
"""
)
# A table is looked up in the same way on all ranks, and then the network has samples of its own.
TABLE = (
    START
    + """
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
table = torch.nn.Embedding(8, 4)
for number in range(100):
    optimizer.zero_grad()
    places = table(torch.arange(8)).detach()
    model(places * 0 + torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""
)
FAILING = START + "raise ValueError('no data')\n"


def lint(steps: int, *scripts: Path) -> subprocess.CompletedProcess[str]:
    assert promised_world(os.environ) is None
    command = [sys.executable, "-P", "-m", "hvdtrain", "lint", "--run", str(steps)]
    command += map(str, scripts)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_what_differs_between_ranks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank that waits for the other one ends the job.
    monkeypatch.setenv("HVDTRAIN_STALL_SECONDS", "3")
    monkeypatch.setenv("HVDTRAIN_STALL_SHUTDOWN_SECONDS", "20")
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    done = lint(5, script)
    assert done.returncode == 1
    found = {
        tuple(line.removeprefix(f"{script}:").split()[:2]) for line in done.stdout.splitlines()
    }
    expected = {
        (f"{number}:", line.rpartition("# ")[2])
        for number, line in enumerate(WRONG.splitlines(), 1)
        if "# HVD9" in line
    }
    assert expected <= found, done.stdout
    assert {code for _, code in found if code.startswith("HVD9")} == {"HVD901", "HVD902", "HVD903"}


def test_equal_inputs_of_one_module_are_not_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "table.py"
    script.write_text(TABLE)
    # Nor does an allocation of other hosts matter: both ranks run here.
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NNODES": "2"}
    allocation |= {"SLURM_NODELIST": "far[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    done = lint(4, script)
    said = "no mistakes found in 1 script\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_a_script_that_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    failing, other = tmp_path / "failing.py", tmp_path / "other.py"
    failing.write_text(FAILING)
    other.write_text("import torch\n")
    done = lint(2, failing, other)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert f"{failing}: no step was taken on two ranks: ValueError: no data" in first
    assert f"{other}: --run is for scripts that use hvdtrain.torch or horovod.torch" in second
