"""The site has every page, every public module, and the exit codes as they are in the code."""

from __future__ import annotations

import re
from functools import reduce
from operator import or_
from pathlib import Path

from hvdtrain import errors

ROOT = Path(__file__).resolve().parents[3]
CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAVIGATION = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", CONFIGURATION, re.MULTILINE)
# The packages that users import, beside `hvdtrain` itself.
NOT_FOR_USERS = ("hvdtrain.cli.", "hvdtrain.horovod.", "hvdtrain.train.options")


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    made = {name for name in NAVIGATION if name.startswith(("reference/", "repository/"))}
    assert set(NAVIGATION) - made == pages
    assert len(NAVIGATION) == len(set(NAVIGATION))


def test_copied_pages_are_there() -> None:
    copied = [name.partition("/")[2] for name in NAVIGATION if name.startswith("repository/")]
    assert copied
    assert [name for name in copied if not (ROOT / name).is_file()] == []


def test_every_public_package_has_a_page() -> None:
    described = (ROOT / "docs" / "hooks" / "functions.py").read_text(encoding="utf-8")
    public = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in ROOT.glob("hvdtrain/**/__init__.py")
        if re.search(r"^__all__ = \[\s*\"", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    undescribed = {name for name in public if f'"{name}"' not in described}
    assert "hvdtrain.torch" in public
    assert [name for name in undescribed if not name.startswith(NOT_FOR_USERS)] == []


def test_every_exit_code_is_listed() -> None:
    page = (ROOT / "docs" / "variables.md").read_text(encoding="utf-8")
    table = page.partition("\n## Exit codes\n")[2]
    listed = {
        int(code)
        for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
        for code in cell.split(",")
    }
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert listed == codes | {0}
    # MPICH's mpiexec joins the codes of ranks by |.
    for code in codes:
        others = [other for other in codes - {code} if other & ~code == 0]
        assert reduce(or_, others, 0) != code
