"""Each rule finds its mistake, in the right line, and leaves alone what is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from lint_cases import MISTAKES, RIGHT

from hvdtrain.lint.check import check_script
from hvdtrain.lint.registry import RULES
from hvdtrain.lint.source.finding import Finding


def found(folder: Path, text: str) -> list[Finding]:
    """Return what the lint says of a script."""
    path = folder / "script.py"
    path.write_text(text)
    return check_script(path)


@pytest.mark.parametrize(("code", "start", "rest"), MISTAKES)
def test_a_mistake_is_found(tmp_path: Path, code: str, start: str, rest: str) -> None:
    text = start + rest
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "# here" in line]
    hits = [finding.line for finding in found(tmp_path, text) if finding.code == code]
    assert hits == lines


@pytest.mark.parametrize(("code", "start", "rest"), RIGHT)
def test_what_is_right_is_left_alone(tmp_path: Path, code: str, start: str, rest: str) -> None:
    assert [str(each) for each in found(tmp_path, start + rest) if each.code == code] == []


def test_every_rule_has_both_kinds_of_scripts() -> None:
    codes = [rule.code for rule in RULES]
    assert len(set(codes)) == len(codes)
    assert {code for code, _, _ in MISTAKES} == set(codes)
    assert {code for code, _, _ in RIGHT} == set(codes)
