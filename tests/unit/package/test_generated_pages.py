"""Pages that scripts write from records say what these say, and setup.py claims what has run."""

from __future__ import annotations

import re
import runpy

import pytest
from bounds import lowest
from paths import ROOT

DOCS = ROOT / "docs"
# Packages of extras that no environment of `make test-versions` has.
NOT_RUN = {"lightning", "matplotlib", "mlflow", "mpich", "pyarrow", "pyspark", "ray", "wandb"}
CLAIMS = """
TRAIN = ["pyyaml>=6.0.1"]
setup(
    python_requires=">=3.11",
    install_requires=["numpy>=2.0"],
    extras_require={"torch": ["torch>=2.4", *TRAIN], "test": ["pytest>=8.0"]},
)
"""


@pytest.mark.parametrize(
    ("name", "page", "reader", "arguments"),
    [
        ("exchanges_page", "exchanges/measured.md", "read_records", [DOCS / "exchanges/measured"]),
        ("gpu_page", "gpu.md", "read_record", [DOCS / "gpu-record.json"]),
        ("versions_page", "versions.md", "read_record", []),
        ("lint_page", "lint.md", None, []),
    ],
)
def test_a_page_is_what_its_record_says(
    name: str, page: str, reader: str | None, arguments: list[object]
) -> None:
    script = runpy.run_path(str(DOCS / f"{name}.py"))
    text = (DOCS / page).read_text(encoding="utf-8")
    records = [script[reader](*arguments)] if reader else []
    assert script["page"](text, *records) == text, f"run docs/{name}.py --write"


def test_lower_bounds_are_those_that_ran_and_all_passed() -> None:
    assert lowest(CLAIMS) == {"numpy": "2.0", "torch": "2.4", "pyyaml": "6.0.1"}
    with pytest.raises(ValueError, match=r"torch>=2\.4 and >=2\.5"):
        lowest(f'{CLAIMS}MORE = ["torch>=2.5"]')
    record = runpy.run_path(str(DOCS / "versions_page.py"))["read_record"]()
    ran, claimed = record["packages"]["oldest"], lowest((ROOT / "setup.py").read_text())
    assert claimed.keys() - ran.keys() == NOT_RUN

    def plain(version: str) -> str:
        return re.sub(r"(\.0)+$", "", version)

    assert [name for name in ran if plain(claimed[name]) != plain(ran[name])] == []
    assert ran.keys() == record["packages"]["newest"].keys()
    both = {"oldest": "passed", "newest": "passed"}
    assert [title for title, ends in record["runs"].items() if ends != both] == []
