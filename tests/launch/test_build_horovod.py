"""`python -m hvdtrain build-horovod`: it says what is missing, builds, caches and checks."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from horovod_environment import horovod_python, require_compiler
from job import Completed
from ranks import start

ROOT = Path(__file__).resolve().parents[2]
BUILD = ("-m", "hvdtrain", "build-horovod")
BUILD_SECONDS = 1800
CACHED_SECONDS = 240


def build(
    *words: str, python: str | Path = sys.executable, timeout_seconds: float = 300, **env: object
) -> Completed:
    return start([python, *BUILD, *words], env={"CXX": None, **env}).end(timeout_seconds)


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    done = build("--without-torch", "--without-tensorflow", PATH=tmp_path, XDG_CACHE_HOME=tmp_path)
    assert done.returncode == 2
    starts = (
        "neither torch nor tensorflow",
        "no C++ compiler (c++, g++, clang++): apt install g++",
        "no make: apt install make",
    )
    for start_ in starts:
        assert f"\n  {start_}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = build(XDG_CACHE_HOME=tmp_path / "file")
    assert done.returncode == 2
    assert f"wheels cannot be kept in {tmp_path}/file/hvdtrain/horovod" in done.stderr
    assert "set XDG_CACHE_HOME" in done.stderr


@pytest.mark.horovod
def test_a_build_that_fails_names_its_log_and_leaves_nothing_else(tmp_path: Path) -> None:
    require_compiler()
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-fsyntax-only*|*-E*) exec c++ "$@";; esac\n'
        "echo 'x.cc:1: error: told to fail'; exit 1\n"
    )
    compiler.chmod(0o755)
    done = build(
        timeout_seconds=300, CXX=compiler, XDG_CACHE_HOME=tmp_path / "cache", TMPDIR=tmp_path
    )
    assert done.returncode == 1
    assert "failed after" in done.stdout
    assert "x.cc:1: error: told to fail" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.splitlines()
    (log,) = (tmp_path / "cache/hvdtrain/horovod").iterdir()
    assert str(log) in done.stderr
    assert "told to fail" in log.read_text()
    assert list(tmp_path.glob("hvdtrain-*")) == []


@pytest.mark.horovod
def test_it_builds_and_checks_and_takes_the_wheel_from_the_cache_next_time(tmp_path: Path) -> None:
    # It installs what it builds, and other tests run with the environment meanwhile.
    shutil.copytree(horovod_python().parent.parent, tmp_path / "environment", symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    done = build(python=python, timeout_seconds=BUILD_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two ranks all-reduce through horovod.torch" in done.stdout
    assert done.stdout.endswith("set HVDTRAIN_ENGINE=horovod to use it\n")

    again = build(python=python, timeout_seconds=CACHED_SECONDS, PATH=_without_compilers())
    assert again.returncode == 0, again.stdout + again.stderr
    assert "its wheel is in the cache: " in again.stdout
    assert "compiling" not in again.stdout

    only = build("--wheel-only", python=python)
    wheel = Path(only.stdout.splitlines()[-1])
    assert wheel.is_file()
    assert wheel.name.startswith("horovod-0.28.1-")
    assert "compiling" not in only.stdout


def _without_compilers() -> str:
    folders = os.get_exec_path()
    return os.pathsep.join(path for path in folders if not shutil.which("c++", path=path))
