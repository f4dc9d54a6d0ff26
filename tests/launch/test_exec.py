"""`python -m hvdtrain exec`: scripts of other libraries find their world under MPI's launchers."""

import json
import sys
from pathlib import Path

import pytest
from hosts import on_hosts
from mpis import MPICH, OPEN_MPI_4
from ranks import launch, run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

from hvdtrain.core.rank_report import distinct_addresses
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.cluster_environment import (
    ClusterRank,
    check_roles,
    jax_variables,
    parse_roles,
    tensorflow_config,
)

EXEC = ["-m", "hvdtrain", "exec"]
DDP = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
assert os.environ["LOCAL_RANK"] == str(rank) and sys.argv[1:] == ["--lr", "0.5"], sys.argv
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
before = model.module.weight.detach().clone()
model(torch.full((1, 2), rank + 1.0)).sum().backward()
print(f"gradient {model.module.weight.grad.tolist()} of {dist.get_world_size()}", flush=True)
left = Path(sys.argv[0]).with_suffix(".left")
dist.destroy_process_group()
if rank == 1:
    left.touch()
while not left.exists():  # rank 0 serves the store, without which the other rank may abort
    time.sleep(0.01)
"""
# As on hosts with folders of their own.
OF_ONE_RANK = """
import os, runpy, sys
from pathlib import Path

script = Path(sys.argv[0]).with_name(os.environ["OMPI_COMM_WORLD_RANK"] + ".py")
sys.argv = ["hvdtrain", "exec", str(script)]
runpy.run_module("hvdtrain", run_name="__main__")
"""
# What a distributed strategy averages: rank r adds r + 1 in each of three steps.
STRATEGY = """
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver
with strategy.scope():
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

@tf.function
def step():
    def replica():
        total.assign_add(float(resolver.task_id) + 1.0)
    strategy.run(replica)

for _ in range(3):
    step()
print(f"{resolver.task_type} {resolver.task_id} of {strategy.num_replicas_in_sync}: "
      f"{total.numpy()}", flush=True)
"""


def place(rank: int) -> ClusterRank:
    """Return the place of a rank of three, two of them on the first node."""
    addresses = ("a:1", "a:2", "b:3")
    return ClusterRank(rank, 3, (0, 1, 0)[rank], (2, 2, 1)[rank], (0, 0, 1)[rank], addresses)


def test_the_variables_of_jax_and_keras() -> None:
    assert jax_variables(place(2)) == {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        "KERAS_DISTRIBUTION_PROCESS_ID": "2",
    }


def test_the_configuration_of_tensorflow() -> None:
    workers = json.loads(tensorflow_config(place(2), ["worker"] * 3))
    assert workers["cluster"] == {"worker": ["a:1", "a:2", "b:3"]}
    assert workers["task"] == {"type": "worker", "index": 2}
    roles = parse_roles("chief:1,ps:1,evaluator:1,worker:0")
    cluster = {"chief": ["a:1"], "ps": ["a:2"]}
    for rank, role in enumerate(("chief", "ps", "evaluator")):
        found = json.loads(tensorflow_config(place(rank), roles))
        assert found == {"cluster": cluster, "task": {"type": role, "index": 0}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("worker:2", "are of 2 ranks, but there are 3"),
        ("worker", "must be one of chief, master, worker, ps, evaluator, a colon, and a number"),
        ("boss:3", "'boss:3' must be one of"),
        ("chief:1,master:1,worker:1", "one chief"),
        ("worker:99999999999", "must be one of"),
    ],
)
def test_roles_that_do_not_fit(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_roles(parse_roles(text), 3)


def test_ranks_of_a_host_that_draw_the_same_ports() -> None:
    offers = [["a:1", "a:2", "a:3"], ["a:1", "a:2"], ["b:1", "b:2"], ["a:2", "a:1", "a:4"]]
    assert distinct_addresses(offers) == ["a:1", "a:2", "b:1", "a:4"]
    with pytest.raises(HvdtrainError, match="rank 2: other ranks of its host"):
        distinct_addresses([["a:1"], ["a:2"], ["a:2", "a:1"]])


def test_a_script_that_only_one_rank_has(tmp_path: Path) -> None:
    """Nobody waits for the rank without it."""
    (tmp_path / "1.py").write_text("print('ran')")
    script = tmp_path / "of_one_rank.py"
    script.write_text(OF_ONE_RANK)
    done = launch(["-P", str(script)], 2).end()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("0.py: name an existing script") == 1


def test_a_module_and_its_arguments(tmp_path: Path) -> None:
    """Options after -m NAME are the module's, and those of Python reach it."""
    (tmp_path / "written.py").write_text(
        "import sys; print(sys.flags.optimize, sys.argv[1:], flush=True)"
    )
    words = ["--lr", "0.1", "--roles", "x", "--print", "--local_rank"]
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_ranks(["-O", *EXEC, "--local-rank", "-m", "written", *words], 1, env=env)
    assert done.stdout == f"1 {['--local-rank=0', *words]}\n"


def test_a_script_of_ddp(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    done = run_ranks([*EXEC, str(script), "--lr", "0.5"], 2)
    assert sorted(done.stdout.splitlines()) == ["gradient [[1.5, 1.5]] of 2"] * 2


def test_a_script_of_a_strategy(tmp_path: Path) -> None:
    script = tmp_path / "strategy.py"
    script.write_text(STRATEGY)
    done = run_ranks(
        [*EXEC, str(script)],
        2,
        python=tensorflow_python(),
        env=keras_variables(),
    )
    assert {"worker 0 of 2: 9.0", "worker 1 of 2: 9.0"} <= set(done.stdout.splitlines())


@pytest.mark.parametrize("mpi", ["openmpi", OPEN_MPI_4, MPICH])
def test_on_two_hosts(mpi: str, tmp_path: Path) -> None:
    done = run_ranks(
        [*EXEC, "--roles", "chief:1,worker:2", "--print"],
        3,
        mpi=mpi,
        # UCX takes the stand-in hosts for one, and looks there for each other's processes.
        env={"UCX_TLS": "tcp,self"},
        **on_hosts(tmp_path, mpi, [2, 1]),
    )
    lines = done.stdout.splitlines()
    assert lines.count("MASTER_ADDR=node0") == 3
    for name, values in {
        "RANK": "012",
        "LOCAL_RANK": "001",
        "LOCAL_WORLD_SIZE": "122",
        "NODE_RANK": "001",
    }.items():
        assert sorted(x for x in lines if x.startswith(f"{name}=")) == [
            f"{name}={v}" for v in values
        ]
    configs = [json.loads(x.partition("=")[2]) for x in lines if x.startswith("TF_CONFIG=")]
    (cluster,) = {json.dumps(config["cluster"]) for config in configs}
    hosts = [
        address.rpartition(":")[0] for role in json.loads(cluster).values() for address in role
    ]
    assert hosts == ["node0", "node0", "node1"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "which script?"),
        (["no.py"], "there is no file no.py"),
        (["-m"], "which module?"),
        (["--rols", "x:1"], "No such option '--rols'"),
        (["--roles", "x:1", "--print"], "x:1"),
    ],
)
def test_bad_input_is_one_line(words: list[str], reason: str) -> None:
    line = [sys.executable, *EXEC, *words]
    done = start(line).end()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert reason in done.stderr
