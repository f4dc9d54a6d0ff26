"""The page that leads through the code names files and functions that are there."""

from __future__ import annotations

import ast
import re

from paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_each_stop_is_there() -> None:
    stops = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(stops) == len(re.findall(r"^\| \d+ \|", PAGE, re.MULTILINE)) > 20
    for file, function in stops:
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        *owner, name = function.split(".")
        if owner:
            (kind,) = [n for n in body if isinstance(n, ast.ClassDef) and n.name == owner[0]]
            body = kind.body
        assert name in {n.name for n in body if isinstance(n, ast.FunctionDef)}, (file, function)


def test_all_files_are_there() -> None:
    files = re.findall(r"`((?:hvdtrain|tests)/[\w/.]+)`", PAGE)
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).exists()] == []
