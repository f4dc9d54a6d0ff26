"""Mistakes of a new user, made for real: one line that says what to do, and no exit code of 0.

Others are made in test_bad_input.py, test_script_tracebacks.py and test_unreachable_hosts.py.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from job import Completed
from outcomes import outcomes
from ranks import mpi_python, start


def hvdtrain(words: Sequence[object], cwd: Path, mpi: str = "openmpi") -> Completed:
    return start([mpi_python(mpi), "-m", "hvdtrain", *words], cwd=cwd).end()


FILES = {"empty": "", "word": "localhost slot=2\n", "x": "localhost slots=2\n"}
RUN = ["run", "-np", 2]
# By what is typed: all that its line has.
COMMANDS: list[tuple[list[object], list[str]]] = [
    (["run", "--", "train"], ["how many ranks? Pass -np N, or name a hostfile"]),
    (["run", "-np", -3], ["-np -3 must be at least 1"]),
    (["run", "-np", "abc"], ["'abc' is not a valid integer. (see 'hvdtrain run --help')"]),
    ([*RUN, "nosuch.py"], ["there is no file nosuch.py: name an existing script"]),
    ([*RUN, "nosuch"], ["'nosuch' cannot be run by ranks: name a script, or"]),
    (["run", "--numranks", 2], ["Did you mean '--num-ranks'?"]),
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
    (["train", "--epoch", 3], ["Did you mean one of: '--epochs', '--warmup-epochs'?"]),
    (["train", "my.py"], ["recipe my.py cannot be read: No such file or directory"]),
    (["train", "--resume", "."], ["--resume . is a directory: resume it with --resume auto"]),
    (["train", "emnist"], ["emnist", "digits"]),
    (
        ["train", "mnist", "--framework", "keras", "--optimizer", "lars"],
        ["--optimizer lars", "tor"],
    ),
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
    line = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(folder)]
    made = start(line).end()
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
