"""The page that leads through the code names files and functions that are there, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^\| (\d) \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)


def defined(path: Path) -> set[str]:
    """Return the names of a module's functions, and of methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


@pytest.mark.parametrize(("_number", "file", "function"), STOPS)
def test_each_stop_is_there(_number: str, file: str, function: str) -> None:
    assert function in defined(ROOT / file)


def test_a_gradient_passes_through_six_files() -> None:
    assert [int(number) for number, _, _ in STOPS] == [1, 2, 3, 4, 5, 6, 1, 2, 3]


def test_all_files_are_there() -> None:
    files = re.findall(r"`((?:hvdtrain|tests)/[\w/.]+)`", PAGE)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []
