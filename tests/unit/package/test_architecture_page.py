"""The page that leads through the code names files and functions that are there, and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)


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


@pytest.mark.parametrize(
    ("walk", "lengths"),
    [("A gradient", [6, 3]), ("A named operation", [9]), ("A training run", [11])],
)
def test_the_stops_of_each_walk_are_numbered(walk: str, lengths: list[int]) -> None:
    section = PAGE.partition(f"\n## {walk}\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]
    assert numbers == [number for length in lengths for number in range(1, length + 1)]


def test_every_stop_names_a_file_and_a_function() -> None:
    assert len(STOPS) == len(re.findall(r"^\| \d+ \|", PAGE, re.MULTILINE))


def test_all_files_are_there() -> None:
    files = re.findall(r"`((?:hvdtrain|tests)/[\w/.]+)`", PAGE)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []
