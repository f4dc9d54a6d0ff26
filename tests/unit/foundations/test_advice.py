"""Versions of frameworks that are too old are refused in one line, and misspelt names are found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from paths import ROOT

from hvdtrain.advice import did_you_mean, nearest_name, require_version
from hvdtrain.errors import UsageError


@pytest.mark.parametrize(
    ("oldest", "found"),
    [
        ("2.4", ["2.4.0", "2.13.0+cpu", "3.0.0a0+git12"]),
        ("0.6.1", ["0.6.1", "0.10.2", "0.9.0.1", "1.0.0rc1", "0.7"]),
        ("3", ["3.0.0", "3.15.1", "10"]),
    ],
)
def test_versions_that_will_do(oldest: str, found: list[str]) -> None:
    for version in found:
        require_version("hvdtrain.any needs Any", "any", version, oldest)


@pytest.mark.parametrize(
    ("oldest", "found"), [("2.4", "2.3.1+cpu"), ("0.6.1", "0.6.0"), ("0.6.1", "0.6"), ("3", "2.15")]
)
def test_versions_that_are_too_old(oldest: str, found: str) -> None:
    line = f"hvdtrain.torch needs PyTorch >= {oldest}, found {found}: pip install 'torch>={oldest}'"
    with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
        require_version("hvdtrain.torch needs PyTorch", "torch", found, oldest)


def calls() -> Iterator[tuple[str, list[str]]]:
    """Yield the interface that checks a version, and the texts that it gives."""
    for path in sorted((ROOT / "hvdtrain").glob("*/__init__.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "require_version":
                texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                yield path.parent.name, list(map(str, texts))


def test_no_version_is_refused_that_setup_claims() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    found = list(calls())
    assert [interface for interface, _ in found] == ["keras", "keras", "tensorflow", "torch"]
    for interface, (need, package, oldest) in found:
        assert need.startswith(f"hvdtrain.{interface} needs ")
        assert package in need.lower()
        claimed = re.findall(rf'"{package}(?:-cpu)?>=([\d.]+)"', setup)
        assert claimed
        for version in claimed:
            require_version(need, package, version, oldest)


def test_names() -> None:
    known = ["train", "report", "check"]
    assert did_you_mean("trian", known) == ": did you mean train?"
    assert did_you_mean("xyz", known) == ""
    assert nearest_name("trian", known, 0.9) is None
