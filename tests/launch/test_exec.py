"""`python -m hvdtrain exec`: scripts of other libraries find their world under MPI's launchers."""

import json
import os
import sys
from pathlib import Path

import pytest
from hosts import on_hosts
from mpis import MPICH, OPEN_MPI_4
from ranks import launch, run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

from hvdtrain.core.rank_report import distinct_addresses
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch import cluster_environment
from hvdtrain.launch.scripts.chief import leading_ranks
from hvdtrain.launch.scripts.script import (
    Script,
    Settings,
    accelerate_variables,
    default_file,
    has_gpu,
    read_file,
    remarks,
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
os._exit(0)  # a thread of torch's process group may abort at Python's usual exit
"""
# As on hosts with folders of their own.
OF_ONE_RANK = """
import os, runpy, sys
from pathlib import Path

script = Path(sys.argv[0]).with_name(os.environ["OMPI_COMM_WORLD_RANK"] + ".py")
sys.argv = ["hvdtrain", "exec", str(script)]
runpy.run_module("hvdtrain", run_name="__main__")
"""
# The process of rank 0 that joins the others for its script is late to end.
LATE = """
import atexit, os, pathlib, sys, time

def end():
    time.sleep(1)
    pathlib.Path(__file__).with_name("ended").touch()

if "hvdtrain.core.rank_report" in sys.orig_argv and os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    atexit.register(end)
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


def first_on_path(folder: Path) -> dict[str, str]:
    others = os.environ.get("PYTHONPATH", "").split()
    return {"PYTHONPATH": os.pathsep.join([str(folder), *others])}


def place(rank: int) -> cluster_environment.ClusterRank:
    return cluster_environment.ClusterRank(
        rank, 3, (0, 1, 0)[rank], (2, 2, 1)[rank], (0, 0, 1)[rank], ("a:1", "a:2", "b:3")
    )


def test_one_rank_is_found_without_mpi(tmp_path: Path) -> None:
    """So that a script that uses MPI is the first process of its rank that does."""
    (tmp_path / "script.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    env = {"MPI4PY_MPIABI": "none"}  # mpi4py cannot be imported
    assert run_ranks([*EXEC, str(tmp_path / "script.py")], 1, env=env).stdout.strip() == "1"


def test_the_variables_of_jax_and_keras() -> None:
    assert cluster_environment.jax_variables(place(2)) == {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        "KERAS_DISTRIBUTION_PROCESS_ID": "2",
    }


def test_the_configuration_of_tensorflow() -> None:
    workers = json.loads(cluster_environment.tensorflow_config(place(2), ["worker"] * 3))
    assert workers["cluster"] == {"worker": ["a:1", "a:2", "b:3"]}
    assert workers["task"] == {"type": "worker", "index": 2}
    roles = cluster_environment.parse_roles("chief:1,ps:1,evaluator:1,worker:0")
    cluster = {"chief": ["a:1"], "ps": ["a:2"]}
    for rank, role in enumerate(("chief", "ps", "evaluator")):
        found = json.loads(cluster_environment.tensorflow_config(place(rank), roles))
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
        cluster_environment.check_roles(cluster_environment.parse_roles(text), 3)


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


def test_scripts_begin_when_the_processes_before_them_have_ended(tmp_path: Path) -> None:
    """Otherwise a script that uses MPI may find a rank's addresses of before."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    script = tmp_path / "script.py"
    script.write_text("import pathlib; print(pathlib.Path(__file__).with_name('ended').exists())")
    done = run_ranks([*EXEC, str(script)], 2, env=first_on_path(tmp_path))
    assert done.stdout == "True\n" * 2


def test_a_script_of_a_strategy(tmp_path: Path) -> None:
    script = tmp_path / "strategy.py"
    script.write_text(STRATEGY)
    done = run_ranks([*EXEC, str(script)], 2, python=tensorflow_python(), env=keras_variables())
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
        *(([], "which script?"), (["no.py"], "there is no file no.py"), (["-m"], "which module?")),
        *((["--rols", "x:1"], "No such option '--rols'"), (["--roles", "x:1", "--print"], "x:1")),
    ],
)
def test_bad_input_is_one_line(words: list[str], reason: str) -> None:
    done = start([sys.executable, *EXEC, *words]).end()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert reason in done.stderr


# As torch.distributed.launch had it.
LOCAL_RANK = """
import argparse, os

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int)
parser.add_argument("--lr", type=float)
arguments = parser.parse_args()
assert str(arguments.local_rank) == os.environ["LOCAL_RANK"]
print(f"local rank {arguments.local_rank}, lr {arguments.lr}", flush=True)
"""
ACCELERATE = """
import threading
import torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
print(accelerator.num_processes, accelerator.mixed_precision, float(total), __name__, flush=True)
for thread in threading.enumerate():  # one rank is watched by a thread, which says what it has seen
    if thread.name.endswith("(_watch)"):
        thread.join()
accelerator.end_training()  # else a thread of torch may still be busy when Python ends, and abort
"""
# What `accelerate config` writes for GPUs.
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: bf16
num_machines: 1
num_processes: 4
use_cpu: false
"""
# Ranks of a task end when the others run, with an exit code: waits.py TASK OTHERS CODE.
WAITING = """
import json, os, sys, time
from pathlib import Path

task, folder = json.loads(os.environ["TF_CONFIG"])["task"]["type"], Path(__file__).parent
if task != sys.argv[1]:
    (folder / f"{task}.runs").touch()
    time.sleep(3600)
while len(list(folder.glob("*.runs"))) < int(sys.argv[2]):
    time.sleep(0.01)
print(f"a {task} is done", flush=True)
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    "option", ["--local_rank", pytest.param("--local-rank", marks=pytest.mark.soak)]
)
def test_the_local_rank_as_an_argument(option: str, tmp_path: Path) -> None:
    script = tmp_path / "launched.py"
    script.write_text(LOCAL_RANK)
    done = run_ranks([*EXEC, option, str(script), "--lr", "0.5"], 2)
    assert sorted(done.stdout.splitlines()) == [f"local rank {n}, lr 0.5" for n in range(2)]


def test_accelerate_without_a_gpu(tmp_path: Path) -> None:
    script, settings = tmp_path / "accelerated.py", tmp_path / "accelerate" / "default_config.yaml"
    script.write_text(ACCELERATE)
    settings.parent.mkdir()
    settings.write_text(YAML)
    env = {"HF_HOME": tmp_path, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": None}
    done = run_ranks([*EXEC, str(script)], 2, env=env)
    assert sorted(done.stdout.splitlines()) == ["2 bf16 3.0 __main__"] * 2
    assert done.stderr.count(f"hvdtrain: {settings}: ") == 2  # one rank speaks
    assert "num_processes: 4, but there are 2 ranks" in done.stderr
    assert "use_cpu: false, but there is no GPU" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("program", [["FOLDER/accelerated.py"], ["-m", "accelerated"]])
def test_accelerate_that_trains_every_rank_alone_is_said(
    program: list[str], tmp_path: Path
) -> None:
    (tmp_path / "accelerated.py").write_text(ACCELERATE)
    env = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "false", **first_on_path(tmp_path)}
    words = [word.replace("FOLDER", str(tmp_path)) for word in program]
    done = run_ranks([*EXEC, *words], 2, env=env)
    assert sorted(done.stdout.splitlines()) == ["1 no 1.0 __main__"] * 2
    assert done.stderr.count("2 models are trained instead of one") == 1


def test_a_script_without_accelerate_does_not_need_its_settings(tmp_path: Path) -> None:
    settings = tmp_path / "accelerate" / "default_config.yaml"
    settings.parent.mkdir()
    settings.write_text("- no settings\n")
    script = tmp_path / "plain.py"
    script.write_text("print('ran', flush=True)")
    assert run_ranks([*EXEC, str(script)], 1, env={"HF_HOME": tmp_path}).stdout == "ran\n"


def test_settings_of_accelerate(tmp_path: Path) -> None:
    path = tmp_path / "accelerate" / "default_config.yaml"
    assert default_file({"HF_HOME": str(tmp_path)}) is None
    path.parent.mkdir()
    path.write_text(
        "distributed_type: NO\ndowncast_bf16: 'no'\nmachine_rank: 0\nmixed_precision: no\n"
        "num_processes: 2\nuse_cpu: true\n"
    )
    assert default_file({"HF_HOME": str(tmp_path)}) == path
    found = read_file(path)
    assert found == Settings(path, 2, True, "no")
    variables = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    assert accelerate_variables(found, gpu=True) == variables
    assert accelerate_variables(None, gpu=True) == {}
    assert remarks(found, 2, gpu=False) == []
    (said,) = remarks(Settings(path, use_cpu=True, mixed_precision="fp16"), 2, gpu=False)
    assert "mixed_precision: fp16 needs a GPU" in said


def test_settings_of_accelerate_that_are_not_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\ndeepspeed_config: {}\n"
        "dynamo_config:\n  dynamo_backend: INDUCTOR\nnum_processes: -1\n"
    )
    (said,) = remarks(read_file(path), 2, gpu=True)
    assert "distributed_type: FSDP, fsdp_config, dynamo_config: not passed on" in said


def test_a_gpu_that_torch_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    assert not has_gpu({}, tmp_path)  # torch is built for the CPU
    torch = tmp_path / "path" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("cuda = '13.0'\nhip = None\nxpu = None\n")
    monkeypatch.syspath_prepend(torch.parent)
    assert has_gpu({}, tmp_path)
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    assert not has_gpu({}, tmp_path / "dri")


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("import torch, accelerate.utils", True),
        ("try:\n    from transformers import Trainer\nexcept ImportError:\n    pass", True),
        *(("import accelerated", False), ("from .accelerate import x", False)),
        *(('"""\nimport accelerate\n"""', False), ("import accelerate as", False)),
    ],
)
def test_what_imports_accelerate(
    text: str, uses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(text)
    (package / "train.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    words: list[list[str]] = [[str(package / "train.py")], ["-m", "package"]]
    words.append(["-m", "package.train"])
    assert [Script.parse(program).uses_accelerate() for program in words] == [uses] * 3
    assert not Script.parse(["-m", "package.missing"]).uses_accelerate()


def test_a_script_that_does_not_know_of_ranks_is_said(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import numpy, parts.model\nprint(parts.model.SIZE, flush=True)")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model.py").write_text("SIZE = 3")
    done = run_ranks([*EXEC, str(script)], 2)
    assert done.stdout == "3\n3\n"
    assert done.stderr.count("each of the 2 ranks does all of the work") == 1
    assert "hvdtrain:" not in run_ranks([*EXEC, str(script)], 1).stderr


@pytest.mark.parametrize(
    ("text", "beside", "ignores"),
    [
        ("import torch\nmodel = torch.nn.DataParallel(model)", "", True),
        ("from torch.distributions import Normal\nimport beside", "import numpy as np", True),
        ("import tensorflow as tf\nplace = tf.distribute.MirroredStrategy()", "", True),
        ("import tensorflow as tf\ntf.distribute.MultiWorkerMirroredStrategy()", "", False),
        ("import torch.distributed as dist", "", False),
        *(("import beside", "from torch import distributed", False), ("import beside", "", True)),
        ("import os\nplace = os.environ['LOCAL_RANK']", "", False),
        ("import keras\nkeras.distribution.initialize()", "", False),
        *(("import some_package", "", False), ("from . import beside", "", False)),
        ("import torch as", "", True),
    ],
)
def test_what_does_not_know_of_ranks(text: str, beside: str, ignores: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    (tmp_path / "beside.py").write_text(beside)
    assert Script.parse([str(script)]).ignores_ranks() == ignores


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(("- a\n", "expected the lines KEY: VALUE"), ("a: [\n", "while parsing")),
        *(("num_processes: two\n", "'two' must be an integer"), (None, "No such file")),
    ],
)
def test_settings_that_cannot_be_read(text: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_file(path)


@pytest.mark.parametrize(
    ("roles", "ends", "others", "said"),
    [
        ("ps:1,chief:1,worker:1", "chief", 2, "the chief has ended: 2 ranks (worker and ps)"),
        ("master:1,worker:1,ps:1", "master", 2, "the chief has ended: 2 ranks (worker and ps)"),
        ("worker:2,ps:1", "worker", 1, "all workers have ended: parameter servers end with them"),
    ],
)
def test_a_job_ends_with_its_chief_or_its_workers(
    roles: str, ends: str, others: int, said: str, tmp_path: Path
) -> None:
    """Whatever the other ranks wait for."""
    script = tmp_path / "waits.py"
    script.write_text(WAITING)
    done = run_ranks([*EXEC, "--roles", roles, str(script), ends, str(others), "0"], 3)
    assert done.stdout == f"a {ends} is done\n" * (3 - others)
    assert done.stderr.count(said) == 1


@pytest.mark.parametrize(
    ("roles", "ends", "others"),
    [("ps:1,worker:1,chief:1", "chief", "2"), ("ps:1,worker:1", "worker", "1")],
)
def test_a_rank_that_leads_and_fails_ends_the_job(
    roles: str, ends: str, others: str, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(WAITING)
    words = [*EXEC, "--roles", roles, str(script), ends, others, "7"]
    assert "hvdtrain:" not in launch(words, roles.count(":")).end(code=7).stderr


def test_which_ranks_end_a_job() -> None:
    assert leading_ranks(["ps", "worker", "chief", "worker"]) == [2]
    assert leading_ranks(["worker", "ps", "worker", "evaluator"]) == [0, 2]
    assert not any(leading_ranks(roles) for roles in (["chief", "worker"], ["ps"], []))
