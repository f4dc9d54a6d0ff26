"""Bad input of some ranks, and worlds that are not what the launcher promised: refused by all."""

import json
import sys
from pathlib import Path

import pytest
import torch
from paths import TESTS
from ranks import launch, mpi_python, run_ranks, start

from hvdtrain.train.checkpoint.file import load_checkpoint, write_checkpoint
from hvdtrain.train.checkpoint.saver import checkpoint_files

WORKER = TESTS / "train" / "train_worker.py"
JOB = ["-m", "hvdtrain", "train"]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            ["--lr", 0.1, "--seed", 1],
            ["--lr", 0.2, "--seed", 2],
            "--seed differs between ranks (rank 0: 1; rank 1: 2)",
        ),
        ([], ["--lr", -1], "rank 1: --lr must be a positive number"),
    ],
)
def test_options_of_one_rank(
    first: list[object], second: list[object], words: str, tmp_path: Path
) -> None:
    """mpirun starts several programs in one job: they must have been asked for the same."""
    both = ["digits", "--epochs", 1, "--out", "out"]
    other = [":", "-np", 1, sys.executable, *JOB, *both, *second]
    done = launch(JOB, 1, args=[*both, *first, *other], cwd=tmp_path).end()
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain:")]
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_every_rank_refuses(tmp_path: Path) -> None:
    """What only rank 0 reads is refused on all ranks, in the same words."""
    words = ["train", "digits", "--epochs", 1, "--batch-size", 500, "--out", tmp_path / "run"]
    start([sys.executable, "-m", "hvdtrain", *words]).end(code=0)
    (whole, *_) = checkpoint_files(tmp_path / "run")
    truncated = tmp_path / whole.name
    truncated.write_bytes(whole.read_bytes()[:-1000])
    content = load_checkpoint(whole, "pt")
    content["model"]["8.weight"] = torch.zeros(11, 64)
    eleven = write_checkpoint(tmp_path, 1, 0, content, "pt")
    cases = [
        {"resume": str(truncated)},
        {"resume": str(eleven)},
        *([] if torch.cuda.is_available() else [{"device": "cuda"}]),
    ]
    said = [
        [str(truncated), "damaged"],
        [str(eleven), "another model", "8.weight", "(11, 64)", "(10, 64)"],
        ["--device cuda", "--device cpu"],
    ]
    every = [{"kind": "plain", "out": str(tmp_path / "out"), **case} for case in cases]
    done = run_ranks(WORKER, 2, args=[json.dumps(every)])
    first, second = done.results
    assert first == second
    for result, expected in zip(first, said, strict=False):
        assert all(word in result["refused"] for word in expected), result
    assert not (tmp_path / "out").exists()


INIT = "from hvdtrain.core import context; context.init(); print('started')"


@pytest.mark.parametrize(
    ("launcher", "library", "names"),
    [
        ("mpich", "openmpi", ["MPICH's or Intel's mpiexec promised 2 ranks", "Open MPI v5"]),
        ("openmpi", "mpich", ["Open MPI's mpirun promised 2 ranks", "MPICH 5"]),
    ],
)
@pytest.mark.mpich
def test_mpirun_and_libmpi_do_not_belong_together(
    launcher: str, library: str, names: list[str]
) -> None:
    mpirun = mpi_python(launcher).parent / "mpirun"
    done = start([mpirun, "-np", 2, mpi_python(library), "-c", INIT]).end(code=78)
    assert "started" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain:")]
    assert len(lines) == 1
    assert all(name in lines[0] for name in names)
    assert "Traceback" not in done.stderr


MPIRUN = {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 8}
TORCHRUN = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}


@pytest.mark.parametrize(
    ("variables", "engine", "code", "message"),
    [
        (MPIRUN, "auto", 78, "promised 8 ranks (OMPI_COMM_WORLD_SIZE=8), but engine mpi with Open"),
        (MPIRUN, "local", 2, "engine local is for one rank, but Open MPI's mpirun started 8"),
        (TORCHRUN, "mpi", 78, "torchrun promised 2 ranks (WORLD_SIZE=2)"),
    ],
)
def test_variables_of_a_launcher_around_a_single_process(
    variables: dict[str, object], engine: str, code: int, message: str
) -> None:
    env = {**variables, "HVDTRAIN_ENGINE": engine}
    done = start([sys.executable, "-c", INIT], env=env).end(code=code)
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
