"""docs/lint.md lists the rules as they are, and our own scripts and pages have no mistakes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from hvdtrain_lint.check import check_script

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md")])
FENCES = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_page_lists_the_rules() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "lint_page.py"))
    text = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert script["page"](text) == text, "run docs/lint_page.py --write"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_have_no_findings(example: Path) -> None:
    assert [str(each) for each in check_script(example)] == []


def test_code_in_the_documentation_has_no_findings(tmp_path: Path) -> None:
    found = []
    blocks = [(page, code) for page in PAGES for code in FENCES.findall(page.read_text("utf-8"))]
    assert len(blocks) > 20
    for number, (page, code) in enumerate(blocks):
        script = tmp_path / f"{number}.py"
        script.write_text(code)
        found += [f"{page.relative_to(ROOT)}: {each}" for each in check_script(script)]
    assert found == []
