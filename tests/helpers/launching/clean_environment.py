"""New environments, as of a machine without a compiler, into which tests install wheels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from job import Completed
from paths import ROOT
from ranks import start

_COMPILER = re.compile(r"(.+-)?(cc|c89|c99|gcc|c\+\+|g\+\+|cpp|clang|clang\+\+)(-[\d.]+)?")
_OLDEST = sys.version_info[:2]
_INSTALL_SECONDS = 600
# The stable ABI is that of Pythons with the GIL.
_RUNS_VENV = (
    "import ensurepip, sys, sysconfig, venv; sys.exit(sysconfig.get_config_var('Py_GIL_DISABLED'))"
)


class CleanEnvironment:
    """An environment of one wheel and its dependencies, and a PATH on which no compiler is."""

    def __init__(self, base: Path, folder: Path, requirement: str) -> None:
        self.python = folder / "environment/bin/python"
        self.path = folder / "path"
        self._cache = folder / "cache"
        _link_all_but_compilers(self.path)
        _run(base, "-m", "venv", self.python.parent.parent)
        # What is imported is compiled to bytecode then, and most is not.
        install = ("-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:")
        _run(self.python, *install, "--constraint", ROOT / "constraints.txt", requirement)

    def run(self, *words: object, timeout_seconds: float = 300) -> Completed:
        env = {
            "PATH": self.path,
            "PYTHONPATH": None,
            "CC": None,
            "CXX": None,
            "XDG_CACHE_HOME": self._cache,
        }
        with start([self.python, *words], env=env) as job:
            done = job.ended(timeout_seconds)
        return done


def newest_python() -> Path:
    """Return the newest interpreter that is newer than this one; skip the test without one.

    Those of pyenv come first: what it puts on PATH may only print an error.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in (14, 13, 12):
        versions = sorted(pyenv.glob(f"3.{minor}.*/bin/python3.{minor}"))
        on_path = [Path(folder, f"python3.{minor}") for folder in os.get_exec_path()]
        for python in (*versions, *on_path):
            if (3, minor) > _OLDEST and python.is_file() and _makes_environments(python):
                return python
    pytest.skip(f"no Python newer than {_OLDEST[0]}.{_OLDEST[1]}, neither of pyenv nor on PATH")


def _makes_environments(python: Path) -> bool:
    done = subprocess.run([python, "-c", _RUNS_VENV], capture_output=True, timeout=60)
    return done.returncode == 0


def _link_all_but_compilers(folder: Path) -> None:
    folder.mkdir()
    for place in map(Path, ("/usr/bin", "/bin", "/usr/sbin", "/sbin")):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if not (_COMPILER.fullmatch(program.name) or link.is_symlink()):
                link.symlink_to(program)


def _run(*words: object) -> None:
    done = subprocess.run(
        [str(word) for word in words],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=_INSTALL_SECONDS,
    )
    if done.returncode != 0:
        raise AssertionError(f"{words} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
