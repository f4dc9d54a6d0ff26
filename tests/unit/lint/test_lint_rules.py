"""Each rule finds its mistake, in the right line, and leaves alone what is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hvdtrain_lint.check import RULES, check_script
from hvdtrain_lint.rules.rule import Finding
from lint_cases import MISTAKES, RIGHT
from lint_plain_cases import HVD, PLAIN_MISTAKES, PLAIN_RIGHT


def found(folder: Path, text: str) -> list[Finding]:
    path = folder / "script.py"
    path.write_text(text)
    return check_script(path)


@pytest.mark.parametrize(("code", "start", "rest"), MISTAKES + PLAIN_MISTAKES)
def test_a_mistake_is_found(tmp_path: Path, code: str, start: str, rest: str) -> None:
    text = start + rest
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "# here" in line]
    hits = [finding.line for finding in found(tmp_path, text) if finding.code == code]
    assert hits == lines


@pytest.mark.parametrize(("code", "start", "rest"), RIGHT + PLAIN_RIGHT)
def test_what_is_right_is_left_alone(tmp_path: Path, code: str, start: str, rest: str) -> None:
    assert [str(each) for each in found(tmp_path, start + rest) if each.code == code] == []


def test_every_rule_has_both_kinds_of_scripts() -> None:
    codes = [rule.code for rule in RULES]
    assert len(set(codes)) == len(codes)
    assert {code for code, _, _ in MISTAKES} == set(codes)
    assert {code for code, _, _ in PLAIN_MISTAKES} == set(codes)
    assert {code for code, _, _ in RIGHT} == set(codes)


def test_values_are_followed_into_modules_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "from torch.optim.lr_scheduler import StepLR\nimport torch.distributed as q\n"
        "def make(o):\n    return StepLR(o, 1)\n"
        "def mean(x):\n    q.all_reduce(x)\n    return x\n"
    )
    rest = (
        "import parts\nfrom parts import make, mean as k\na, b = make(o), parts.make(o)\n"
        "if r == 0:\n    a.step()\n    b.step()\n    k(x)\n    parts.mean(x)\n"
    )
    hits = [(each.code, each.line) for each in found(tmp_path, HVD + rest)]
    first = len(HVD.splitlines()) + 5
    assert hits == [
        *(("HVD104", first), ("HVD104", first + 1), ("HVD101", first + 2), ("HVD101", first + 3))
    ]
