"""Mistakes of a new user, made for real: one line that says what to do, and no exit code of 0.

Others are made in test_bad_input.py, test_wrong_launcher.py, test_script_tracebacks.py and
test_unreachable_hosts.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from job import Completed
from outcomes import outcomes
from ranks import mpi_python, start

HOSTFILES = {
    "word": "localhost slot=2\n",
    "number": "localhost slots=two\n",
    "mpich": "localhost:2\n",
    "empty": "# none yet\n",
    "few": "localhost slots=1\n",
}


def hvdtrain(words: Sequence[object], cwd: Path, mpi: str = "openmpi") -> Completed:
    done = start([mpi_python(mpi), "-m", "hvdtrain", *words], cwd=cwd).end()
    return done


COMMANDS: list[tuple[list[object], str]] = [
    (["run", "--", "train"], "how many ranks? Pass -np N, or name a hostfile"),
    (["run", "-np", 0], "-np 0 must be at least 1"),
    (["run", "-np", "abc"], "'abc' is not a valid integer. (see 'hvdtrain run --help')"),
    (["run", "-np", 2, "nosuch.py"], "there is no file nosuch.py: name an existing script"),
    (["run", "-np", 2, "nosuch"], "'nosuch' cannot be run by ranks: name a script, or"),
    (["run", "--numranks", 2], "Did you mean '--num-ranks'?"),
    (["run", "-np", 2, "python", "a.py"], "leave out 'python', and begin with the script"),
    (["run", "-np", 2, "-hostfile", "none"], "hostfile none: does not exist: see hostfiles/"),
    (["run", "-np", 2, "-hostfile", "word"], "word:1: 'slot=2': Open MPI knows slots=,"),
    (["run", "-np", 2, "-hostfile", "number"], "'slots=two': needs an integer of at least 1"),
    (["run", "-np", 2, "-hostfile", "mpich"], "write 'localhost slots=2'"),
    (["run", "-np", 2, "-hostfile", "empty"], "names no host: write one host per line"),
    (["run", "-np", 2, "-hostfile", "few"], "2 ranks need more than the 1 slots of"),
    (["run", "-np", 2, "--interface", "eth77"], "--interface eth77: this host has "),
    (["train", "--epoch", 3], "Did you mean one of: '--epochs', '--warmup-epochs'?"),
    (["train", "my.py"], "recipe my.py cannot be read: No such file or directory"),
    (["evaluate", "nowhere"], "nowhere is not the directory of a run"),
    (["report", "nowhere"], "nowhere: there is no such directory"),
    (["train", "--resume", "."], "--resume . is a directory: resume it with --resume auto"),
]


def test_commands(tmp_path: Path) -> None:
    for name, text in HOSTFILES.items():
        (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    found = outcomes([words for words, _ in COMMANDS], tmp_path)
    for (words, said), done in zip(COMMANDS, found, strict=True):
        assert (done.returncode, done.stdout) == (2, ""), words
        assert done.stderr.startswith("hvdtrain: "), words
        assert said in done.stderr, words
        assert len(done.stderr.splitlines()) == 1, words
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [["train"], ["run", "-np", 2, "--", "train"]])
@pytest.mark.mpich
def test_without_torch(words: list[object], tmp_path: Path) -> None:
    """The environment of MPICH has no framework."""
    done = hvdtrain(words, tmp_path, "mpich")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain:")]
    assert lines == ["hvdtrain: torch is not installed: pip install 'hvdtrain[torch]'"]


def test_a_misspelt_variable(tmp_path: Path) -> None:
    code = "import hvdtrain.torch as hvd; hvd.init()"
    done = start([sys.executable, "-c", code], env={"HVDTRAIN_BUCKETS_BYTES": 1}).end(code=2)
    line = "HVDTRAIN_BUCKETS_BYTES has no effect: did you mean HVDTRAIN_BUCKET_BYTES?"
    assert done.stderr == f"hvdtrain: {line}\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with room for 40 KiB."""
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
