"""One version everywhere, and what a release on GitHub says of it."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml
from paths import ROOT

import hvdtrain

NOTES = ROOT / ".github" / "release_notes.py"
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]

_HEADING = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)


def changelog() -> str:
    """Return the text of CHANGELOG.md."""
    return (ROOT / "CHANGELOG.md").read_text()


def releases() -> list[tuple[str, str]]:
    """Return version and date of each release in the changelog, the newest first."""
    found = _HEADING.findall(changelog())
    assert found[0] == ("Unreleased", "")
    return found[1:]


def told(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script on the repository in a folder."""
    script = root / NOTES.relative_to(ROOT)
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the script and two releases."""
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


def test_the_sections_of_the_changelog_are_in_their_order() -> None:
    for part in re.split(r"^## ", changelog(), flags=re.MULTILINE)[1:]:
        titles = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert titles == [title for title in SECTIONS if title in titles]


def test_citation() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert all(cited[key] for key in ("message", "title", "authors"))
    assert (cited["type"], cited["license"]) == ("software", "Apache-2.0")
    assert (cited["version"], cited["date-released"].isoformat()) == releases()[0]


def test_the_security_policy_is_about_this_minor_version() -> None:
    minor = hvdtrain.__version__.rpartition(".")[0]
    assert f"which is {minor}." in (ROOT / "SECURITY.md").read_text()


def test_notes_are_the_section_of_the_release(repository: Path) -> None:
    done = told(repository, "v1.2.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "### Fixed\n\n- [One](docs/one.md#here), [two](https://two.org).\n"
    done = told(repository, "v1.2.0", "https://git.org/blob/v1.2.0")
    assert "[One](https://git.org/blob/v1.2.0/docs/one.md#here), [two](https://two" in done.stdout


def test_notes_of_this_release() -> None:
    done = told(ROOT, hvdtrain.__version__)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("### ")
    assert done.stdout in changelog()


def test_a_tag_with_another_version_is_refused(repository: Path) -> None:
    done = told(repository, "v1.3.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the release is 1.3.0, and hvdtrain/__init__.py says 1.2.0" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[1.2.0] - 2027-01-31", "[1.2.0]", "CHANGELOG.md begins with 1.1.0"),
        ("## [1.", "## 1.", "CHANGELOG.md has no release"),
    ],
)
def test_a_changelog_without_the_release_is_refused(
    repository: Path, old: str, new: str, message: str
) -> None:
    path = repository / "CHANGELOG.md"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = told(repository, "1.2.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_a_release_of_which_nothing_is_said_is_refused(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("## [1.2.0] - 2027-01-31\n\n## [1.1.0] - 2026-12-01\n")
    done = told(repository, "1.2.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert "says nothing of 1.2.0" in done.stderr


def test_usage() -> None:
    assert told(ROOT).returncode == 2
