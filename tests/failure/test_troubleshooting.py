"""Mistakes of a new user, made for real: one line that says what to do, and no exit code of 0.

Others are made in test_script_tracebacks.py and test_unreachable_hosts.py.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from job import Completed
from outcomes import outcomes
from paths import TESTS
from ranks import launch, mpi_python, run_ranks, start

from hvdtrain.train.checkpoints import checkpoint_files, load_checkpoint, write_checkpoint


def hvdtrain(words: Sequence[object], cwd: Path, mpi: str = "openmpi") -> Completed:
    return start([mpi_python(mpi), "-m", "hvdtrain", *words], cwd=cwd).end()


FILES = {
    "empty": "",
    "word": "localhost slot=2\n",
    "x": "localhost slots=2\n",
    "rate.yaml": "learning_rate: 1\n",
}
RUN = ["run", "-np", 2]
# By what is typed: all that its line has.
COMMANDS: list[tuple[list[object], list[str]]] = [
    (["run", "-np", -3], ["-np -3 must be at least 1"]),
    (["run", "-np", "abc"], ["'abc' is not a valid integer. (see 'hvdtrain run --help')"]),
    ([*RUN, "nosuch.py"], ["there is no file nosuch.py: name an existing script"]),
    ([*RUN, "nosuch"], ["'nosuch' cannot be run by ranks: name a script, or"]),
    (["run", "--numranks", 2], ["Did you mean '--num-ranks'?"]),
    ([*RUN, "--epochs", 2], ["No such option '--epochs'. (options of train follow --)"]),
    ([*RUN, "python", "a.py"], ["leave out 'python', and begin with the script"]),
    ([*RUN, "python3", "-m", "hvdtrain"], ["already: write -- train"]),
    ([*RUN, "--", "-m", "hvdtrain", "train", "--epochs", 1], ["write -- train --epochs 1"]),
    ([*RUN, "--", "-m", "package.module"], ["write -- and the path of its file"]),
    ([*RUN, "--", "-c", "print(1)"], ["put it into a file and write -- FILE"]),
    ([*RUN, "-hostfile", "word"], ["word:1: 'slot=2': Open MPI knows slots=,"]),
    ([*RUN, "-H", "a:x"], ["-H:1: 'a:x': needs an integer"]),
    ([*RUN, "-H", "a", "-hostfile", "x"], ["-hostfile and -H both name hosts"]),
    ([*RUN, "-x", "NO_SUCH_VARIABLE"], ["-x NO_SUCH_VARIABLE: it is not set here"]),
    ([*RUN, "--bind", "gpu"], ["'gpu' is not one of"]),
    ([*RUN, "--launcher", "jsrun"], ["--launcher jsrun: there is no jsrun on PATH"]),
    ([*RUN, "--output-dir", "empty"], ["cannot create a directory: [Errno 17] File exists: '"]),
    ([*RUN, "--output-dir", "logs", "--prefix"], ["cannot be combined with --output-dir"]),
    (["train", "--epoch", 3], ["Did you mean '--epochs'?"]),
    ([*RUN, "--", "train", "--learning-rate", 0.1], ["Did you mean '--lr'? (see 'hvdtrain train"]),
    (["train", "my.py"], ["recipe my.py cannot be read: No such file or directory"]),
    (["train", "--resume", "."], ["--resume . is a directory: resume it with --resume auto"]),
    (["train", "--resume", "absent.pt"], ["there is no checkpoint"]),
    (["train", "emnist"], ["emnist", "digits"]),
    (
        ["train", "mnist", "--framework", "keras", "--optimizer", "lars"],
        ["--optimizer lars", "tor"],
    ),
    (["train", "--config", "rate.yaml"], ["rate.yaml:1", "did you mean lr?"]),
    (["train", "--config", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
    (["train", "digits", "--framework", "caffe"], ["--framework", "caffe", "torch"]),
    (["train", "digits", "--exchange", "averag"], ["--exchange 'averag'", "one of average, half,"]),
    (["train", "digits", "--batch-size", "many"], ["--batch-size", "many"]),
    (["train", "digits", "--epochs", 0], ["--epochs", "0"]),
    (["train", "digits", "--epochs", "1.5"], ["--epochs", "1.5"]),
    (["train", "digits", "--lr", "-inf"], ["--lr", "inf"]),
    (["train", "digits", "--lr", "1e308"], ["--lr", "1e+308", "float32"]),
    (["train", "digits", "--lr", "1e38", "--optimizer", "adam"], ["--lr", "1e+38", "float32"]),
    (["train", "digits", "--out", "x" * 300], ["x" * 300, "--out"]),
    (["train", "digits", "--resume", "x" * 300], ["x" * 300, "--resume"]),
    (["train", "digits", "digits"], ["digits"]),
    (["evaluate", "nowhere"], ["nowhere is not the directory of a run"]),
    (["timeline", "it.json"], ["no pieces such as ", "/it.rank-0.json are there: "]),
    (["report", "nowhere"], ["nowhere: there is no such directory"]),
]


def test_commands(tmp_path: Path) -> None:
    """One process reads one after the other; nothing is started, nor written."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    found = outcomes([words for words, _ in COMMANDS], tmp_path)
    for (words, said), done in zip(COMMANDS, found, strict=True):
        assert (done.returncode, done.stdout) == (2, ""), words
        assert done.stderr.startswith("hvdtrain: "), words
        assert all(each in done.stderr for each in said), (words, done.stderr)
        assert len(done.stderr.splitlines()) == 1, words
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [["train"], ["run", "-np", 2, "--", "train"], ["bench"]])
@pytest.mark.mpich
def test_without_torch(words: list[object], tmp_path: Path) -> None:
    """The environment of MPICH has no framework."""
    done = hvdtrain(words, tmp_path, "mpich")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain:")]
    assert lines == ["hvdtrain: torch is not installed: pip install 'hvdtrain[torch]'"]


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        (
            "HVDTRAIN_BUCKETS_BYTES",
            "HVDTRAIN_BUCKETS_BYTES has no effect: did you mean HVDTRAIN_BUCKET_BYTES?",
        ),
        (
            "HVDTRAIN_ENGINE",
            "unknown engine 'smoke': choose one of auto, local, mpi, gloo, nccl, horovod",
        ),
    ],
)
def test_a_misspelt_variable(variable: str, line: str) -> None:
    code = "import hvdtrain.torch as hvd; hvd.init()"
    done = start([sys.executable, "-c", code], env={variable: "smoke"}).end(code=2)
    assert done.stderr == f"hvdtrain: {line}\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = start(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(folder)]).end()
    if made.returncode != 0:
        pytest.skip(f"no disk of its own for this user: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    done = hvdtrain(["train", "digits", "--epochs", 1, "--out", small_disk / "out"], tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"hvdtrain: a checkpoint of {small_disk}/out could not be written (No ")
    assert last.endswith("Make room there, or name another directory with --out")


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
    first, second = run_ranks(WORKER, 2, args=[json.dumps(every)]).results
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
