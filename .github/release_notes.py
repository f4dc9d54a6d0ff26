"""Prints what CHANGELOG.md says of a release: release_notes.py VERSION [URL], or the tag vVERSION.

It fails if this is not the version of the package, or not the newest release of the changelog.
Links to files of the repository begin with URL, if one is given.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_RELEASE = re.compile(r"^## \[(\d[^\]]*)\] - (\d{4}-\d{2}-\d{2})$", re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:|#)")


class ReleaseError(Exception):
    """The release cannot be made; the message says why."""


def notes(version: str, package: str, changelog: str, url: str = "") -> str:
    """Return the section of a release, without its heading.

    Args:
        version: version that is released.
        package: text of hvdtrain/__init__.py.
        changelog: text of CHANGELOG.md.
        url: folder on the web to which links to files are relative; "" to leave them.

    Raises:
        ReleaseError: the package or the changelog has another version, or the section is empty.
    """
    found = _VERSION.search(package)
    if found is None or found[1] != version:
        told = "no version" if found is None else found[1]
        raise ReleaseError(f"the release is {version}, and hvdtrain/__init__.py says {told}")
    newest = _RELEASE.search(changelog)
    if newest is None or newest[1] != version:
        told = "has no release" if newest is None else f"begins with {newest[1]}"
        raise ReleaseError(f"the release is {version}, and CHANGELOG.md {told}")
    older = _RELEASE.search(changelog, newest.end())
    section = changelog[newest.end() : older.start() if older else None].strip()
    if not section:
        raise ReleaseError(f"CHANGELOG.md says nothing of {version}")
    return _LINK.sub(f"]({url.rstrip('/')}/" if url else "](", section) + "\n"


def main(words: list[str]) -> int:
    """Print the notes; return the exit code."""
    if not 1 <= len(words) <= 2:
        print("usage: release_notes.py VERSION [URL]", file=sys.stderr)
        return 2
    package = (ROOT / "hvdtrain" / "__init__.py").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        print(notes(words[0].removeprefix("v"), package, changelog, *words[1:]), end="")
    except ReleaseError as error:
        print(f"release_notes.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
