"""What Horovod is built with, and when a wheel serves again."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.horovod.build.plan import Target, choices, find_toolchain, runpath
from hvdtrain.horovod.build.workshop import BuildFailedError, Log
from hvdtrain.horovod.names.finder import HorovodFinder
from hvdtrain.launch.launchers.mpi_library import MpiLibrary

TARGET = Target(
    torch="2.13.0+cpu", tensorflow="", mpi="openmpi5", runpath="/opt/mpi/lib",
    python="cpython-311", platform="linux-x86_64", cuda=False, choices={},
)  # fmt: skip


@pytest.mark.parametrize("name", [one.name for one in fields(Target)])
def test_whatever_decides_about_a_wheel_changes_its_name(name: str) -> None:
    assert replace(TARGET, **{name: "other"}).key != TARGET.key  # type: ignore[arg-type]


def test_only_variables_of_the_build_count() -> None:
    environ = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CYCLE_TIME": "1", "PATH": "/bin"}
    assert choices(environ) == {"HOROVOD_GPU_OPERATIONS": "NCCL"}


@pytest.mark.parametrize(
    ("library", "writable", "expected"),
    [
        ("/home/u/.venv/lib/libmpi.so.40", True, "$ORIGIN/../../../.."),
        ("/home/u/.other/lib/libmpi.so.40", True, "$ORIGIN/../../../../../../.other/lib"),
        ("/opt/mpi/lib/libmpi.so.40", True, "/opt/mpi/lib"),
        ("/home/u/.venv/lib/libmpi.so.40", False, "/home/u/.venv/lib"),
    ],
)
def test_mpi_in_or_beside_the_environment_may_move_with_it(
    library: str, writable: bool, expected: str
) -> None:
    prefix = Path("/home/u/.venv")
    packages = prefix / "lib" / "python3.11" / "site-packages"
    assert runpath(Path(library), packages, prefix, writable) == expected


def test_headers_of_another_mpi_do_not_count() -> None:
    with pytest.raises(UsageError, match=r"no MPI headers for MPICH 9\.0 .*pip install mpich"):
        find_toolchain(MpiLibrary("mpich", "9.0", None), {"PATH": "/usr/bin:/bin"}, [])


def test_a_failed_command_shows_its_errors_and_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    noise = "for i in $(seq 50); do echo noise; done"
    program = f"echo a.cc:1: error: first; {noise}; echo '2 errors generated'; exit 3"
    with open(path, "w") as file, pytest.raises(BuildFailedError) as raised:
        Log(file, path).run(["bash", "-c", program], {"PATH": "/usr/bin:/bin"})
    message = str(raised.value)
    assert message.startswith(f"bash ended with code 3; its output is in {path}")
    assert "a.cc:1: error: first" in message
    assert "noise" not in message
    assert path.read_text().count("noise\n") == 50


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> HorovodFinder:
    package = ModuleType("horovod")
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return HorovodFinder(package)


@pytest.mark.parametrize("name", ["horovod.tensorflow.keras", "horovod.tensorflow.keras.callbacks"])
def test_keras_2_is_refused_where_keras_3_is_meant(
    name: str, finder: HorovodFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    with pytest.raises(UsageError, match=f"TF_USE_LEGACY_KERAS=1 .* {name} is for Keras 3"):
        finder.find_spec(name, None)
    assert finder.find_spec("horovod.keras", None) is not None  # which is Keras 3 in any case
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    assert finder.find_spec(name, None) is not None


def test_names_that_nothing_answers_say_what_there_is(finder: HorovodFinder) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"it has .*horovod\.tensorflow\.elastic"):
        finder.find_spec("horovod.tensorflow.nonsense", None)
