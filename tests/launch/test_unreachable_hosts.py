"""Hosts that ssh does not reach are named in one line, before mpirun is started."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosts import AGENT
from job import Completed
from mpis import MPICH
from ranks import mpi_python, start


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """Return a folder with an ssh that reaches hosts on this machine, but for node1 and node2."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").symlink_to(AGENT)
    for name in ("node1", "node2"):
        (tmp_path / f"{name}.down").touch()
    return folder


def run(words: Sequence[object], shell: Path, mpi: str = "openmpi") -> Completed:
    env = {"PATH": f"{shell}:{os.environ['PATH']}", "TMPDIR": shell.parent}
    script = shell / "hello.py"
    script.write_text("print('hello')\n")
    return start([mpi_python(mpi), "-m", "hvdtrain", "run", *words, script], env=env).end()


@pytest.mark.parametrize("mpi", ["openmpi", MPICH])
def test_hosts_that_are_down(shell: Path, mpi: str) -> None:
    done = run(["-np", 3, "-H", "localhost:1,node1:1,node2:1"], shell, mpi)
    why = "(connect to host {} port 22: No route to host)"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"hvdtrain: ssh does not reach node1 {why.format('node1')}; node2 {why.format('node2')}: "
        "correct the hosts, or see to it that `ssh node1 true` works without a password\n"
    )


def test_this_host_needs_no_ssh(shell: Path) -> None:
    """Nor is it asked for by its own name, even where ssh would fail."""
    (shell.parent / f"{socket.gethostname()}.down").touch()
    for name in (socket.gethostname(), "127.0.0.1"):
        done = run(["-np", 2, "-H", f"{name}:2"], shell)
        assert (done.returncode, done.stdout) == (0, "hello\n" * 2), done.stderr


def test_without_ssh(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    words = ["-m", "hvdtrain", "run", "-np", 2, "-H", "node1:2", "--", "train"]
    assert start([mpi_python("openmpi"), *words], env={"PATH": folder}).end(code=2).stderr == (
        "hvdtrain: there is no ssh on PATH, with which ranks are started on node1: install an ssh "
        "client\n"
    )
