"""Programs of other libraries, as tutorials have them, with what they must give."""

import sys
from pathlib import Path

from ranks import launch, run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

from hvdtrain.launch.cluster_environment import free_port

PROGRAMS = Path(__file__).parent / "other_programs"
SUM = """
import os, sys
import torch
import hvdtrain.torch as hvd

hvd.init()
total = float(hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum))
print(f"{total} on {os.environ.get('GROUP_RANK', 'none')} of {hvd.size()}\\n", end="", flush=True)
if sys.argv[1:] == ["fail"] and hvd.rank() == 1:
    raise ValueError("told to")
hvd.barrier()
"""
LAYERS = """
import torch
import hvdtrain.torch as hvd

hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SyncBatchNorm(4))
hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
"""
SCRIPTED = """
import hvdtrain, mlflow, torch
import hvdtrain.torch as hvd

def train(run_id):
    hvd.init()
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.rank() == 0:
        how = {"serialization_format": "pickle", "pip_requirements": ["torch"]}
        with mlflow.start_run(run_id):
            mlflow.pytorch.log_model(torch.jit.script(model), name="model", **how)
    return model(INPUTS).tolist()

INPUTS = torch.arange(4.0).reshape(2, 2)
with mlflow.start_run() as run:
    first, second = hvdtrain.run(train, args=(run.info.run_id,), np=2)
(logged,) = mlflow.MlflowClient().get_run(run.info.run_id).outputs.model_outputs
model = mlflow.pytorch.load_model(f"models:/{logged.model_id}")
assert first == second == model(INPUTS).tolist()
assert isinstance(model, torch.jit.ScriptModule)
"""
# As cells of a notebook.
CELLS = """
def train(rate):
    import hvdtrain.torch as hvd
    hvd.init()
    return hvd.rank(), rate * hvd.size()

import hvdtrain
print(hvdtrain.run(train, args=(0.5,), np=2))
"""


def test_a_coordinator_a_worker_a_parameter_server_and_an_evaluator(tmp_path: Path) -> None:
    """Three steps towards 3, each of half the way; the evaluator reads the last checkpoint."""
    words = ["--roles", "chief:1,worker:1,ps:1,evaluator:1", str(PROGRAMS / "parameter_server.py")]
    done = run_ranks(
        ["-m", "hvdtrain", "exec", *words, str(tmp_path)],
        4,
        python=tensorflow_python(),
        env=keras_variables(),
    )
    lines = {line for line in done.stdout.splitlines() if line.startswith(("chief", "evaluator"))}
    assert lines == {"chief: weight 2.625 on the server", "evaluator: loss 0.140625"}


def test_what_torch_divides_under_exec(tmp_path: Path) -> None:
    """What docs/limits.md names in place of hvdtrain."""
    program = str(PROGRAMS / "divided_model.py")
    done = launch(["-m", "hvdtrain", "exec", program], 2, cwd=tmp_path).end(code=0)
    assert "divided in three ways\n" in done.stdout


def test_layers_made_before_anything_else_of_ours_is_used() -> None:
    assert run_ranks(["-c", LAYERS], 2).stderr.count("use hvd.SyncBatchNorm") == 1


def test_a_model_that_a_rank_logs_as_a_script(tmp_path: Path) -> None:
    """To the caller's run; the caller loads it."""
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    start([sys.executable, "-c", SCRIPTED], env=env, cwd=tmp_path).end(code=0)


def test_a_launcher_on_each_of_two_hosts(tmp_path: Path) -> None:
    """torchrun --nnodes 2, here on one machine."""
    script, port = tmp_path / "sum.py", free_port("127.0.0.1")
    script.write_text(SUM)
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    words += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    with start([*words, "--node-rank=1", script]) as second:
        first = start([*words, "--node-rank=0", script]).end(code=0)
        assert second.ended(code=0).stdout == "10.0 on 1 of 4\n" * 2
    assert first.stdout == "10.0 on 0 of 4\n" * 2


def test_ranks_from_ipython(tmp_path: Path) -> None:
    """Called in a session, and as CNTK's tutorial starts them: mpiexec ipython SCRIPT."""
    ipython, env = ["-m", "IPython", "--no-banner"], {"IPYTHONDIR": tmp_path}
    cells, script = tmp_path / "cells.ipy", tmp_path / "sum.py"
    cells.write_text(CELLS)
    script.write_text(SUM)
    done = start([sys.executable, *ipython, cells], env=env).end(code=0)
    assert done.stdout == "[(0, 1.0), (1, 1.0)]\n"
    done = run_ranks([*ipython, str(script)], 2, env=env)
    assert done.stdout == "3.0 on none of 2\n" * 2
    failed = launch([*ipython, str(script), "--", "fail"], 2, env=env).end(code=1)
    assert "ValueError" in failed.stdout + failed.stderr
