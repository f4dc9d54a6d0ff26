"""What holds for every test: where it runs, what it must not leave behind, what is reported."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from leaks import MARK, Snapshot, leaks, restore

_CHECKOUT = Path(__file__).parents[1]
# Lost ranks, programs of users, explorations, broken installations: `make test` leaves them to
# `make test-rest`.
LONG = [
    *("failure/*.py", "scripts/*.py", "bench/*.py", "compare/*.py", "train/test_own_recipe.py"),
    *("unit/core/agreement/test_exploration*.py", "unit/core/test_stream_order.py"),
    *("kernel/*.py", "launch/test_lint_run.py", "launch/test_check.py"),
]
_PATIENCE_SECONDS = 120.0
_HEADER_PACKAGES = ("hvdtrain", "torch", "mpi4py", "numpy")
# The library can be asked for its name without initialising MPI.
_MPI_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
    "print(*MPI.Get_library_version().splitlines()[0].rstrip(chr(0)).split(',')[0].split())"
)
_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", metavar="FILE", help="write here how tests on a GPU ended")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = uuid.uuid4().hex
    if os.environ.get("HVDTRAIN_TEST_CHECKOUT") == "1":
        _look_in_the_checkout(config)
    # Tests beside each other share the cores: how long an example takes says nothing.
    settings.register_profile("shared", deadline=None)
    settings.load_profile("shared")
    # A shell has its background jobs ignore Ctrl-C, and all that they start inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    record = config.getoption("--gpu-record")
    if record and not hasattr(config, "workerinput"):  # a worker of xdist writes none
        versions = {name: _version(name) for name in _HEADER_PACKAGES}
        versions["mpi"] = _mpi_library(sys.executable)
        config.pluginmanager.register(GpuRecord(Path(record), versions))


def _look_in_the_checkout(config: pytest.Config) -> None:
    """Find the packages beside hvdtrain, and its commands in them, in the checkout."""
    metadata = tempfile.mkdtemp(prefix="hvdtrain-tests-")
    config.add_cleanup(lambda: shutil.rmtree(metadata))
    words = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", metadata]
    subprocess.run(words, cwd=_CHECKOUT, check=True, capture_output=True)
    found = [metadata, str(_CHECKOUT / "benchmarks"), str(_CHECKOUT / "tools")]
    sys.path[:0] = found
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, *([inherited] if inherited else [])])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.match(f"tests/{files}") for files in LONG):
            item.add_marker("long")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_report_header(config: pytest.Config) -> list[str]:
    versions = ", ".join(f"{name} {_version(name)}" for name in _HEADER_PACKAGES)
    mpich = os.environ.get("HVDTRAIN_MPICH_PYTHON", "")
    return [
        f"versions: {versions}",
        f"MPI: {_mpi_library(sys.executable)}; contract run: "
        + (_mpi_library(mpich) if mpich else "HVDTRAIN_MPICH_PYTHON is not set"),
    ]


@pytest.fixture(scope="session", autouse=True)
def outside_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run in an empty directory: Python looks for packages where it is started."""
    directory, before = tmp_path_factory.mktemp("session"), Path.cwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)


@pytest.fixture(autouse=True)
def no_leaks(outside_the_checkout: Path) -> Iterator[None]:
    """Fail a test that leaves variables, its directory, threads or processes changed."""
    before = Snapshot.take()
    yield
    found = leaks(before, _PATIENCE_SECONDS)
    if found:
        restore(before)
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _mpi_library(python: str) -> str:
    try:
        done = subprocess.run(
            [python, "-c", _MPI_LIBRARY], capture_output=True, text=True, timeout=300, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} loads none ({error})"
    return done.stdout.strip()


class GpuRecord:
    """A plugin of pytest that writes how each test ended, and on what; nothing about the host."""

    def __init__(self, path: Path, versions: dict[str, str]) -> None:
        self._path, self._versions = path.absolute(), versions
        self._started = time.monotonic()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._tests.setdefault(report.nodeid, {"outcome": "unfinished", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 1)
        if report.outcome != "passed" or report.when == "call":
            found["outcome"] = report.outcome
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            found["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        found |= dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        outcomes = [test["outcome"] for test in self._tests.values()]
        document = {
            "date": datetime.now(UTC).date().isoformat(),
            **_hardware(),
            "python": platform.python_version(),
            **self._versions,
            "seconds": round(time.monotonic() - self._started),
            **{
                kind: outcomes.count(kind) for kind in ("passed", "failed", "skipped", "unfinished")
            },
            "tests": dict(sorted(self._tests.items())),
        }
        self._path.write_text(json.dumps(document, indent=1) + "\n")


def _hardware() -> dict[str, object]:
    import torch

    count = torch.cuda.device_count()
    nccl: Any = torch.cuda.nccl
    return {
        "gpu": torch.cuda.get_device_name() if count else None,
        "gpus": count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if count else None,
    }


def _driver() -> str | None:
    try:
        done = subprocess.run(_DRIVER, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip()


def _remove(group: Path) -> None:
    """Remove a control group: the kernel may count a process a moment longer that has ended."""
    deadline = time.monotonic() + 300
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Make a control group with 128 MiB, of version 1 or 2."""
    for folder, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", folder, f"hvdtrain-test-{os.getpid()}")
        with ExitStack() as stack, suppress(OSError):
            group.mkdir()
            stack.callback(_remove, group)
            (group / limit).write_text(str(128 << 20))
            for swap, most in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", 128 << 20)):
                if (group / swap).exists():
                    (group / swap).write_text(str(most))
            yield group
            return
    pytest.skip("this user may not make control groups for memory")
