"""docs/versions.md says what the record says, and setup.py claims what has run."""

from __future__ import annotations

import re
import runpy
from typing import Any

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


def record() -> dict[str, Any]:
    """Return the record of the last `make test-versions`."""
    found: dict[str, Any] = runpy.run_path(str(DOCS / "versions_page.py"))["read_record"]()
    return found


def claims() -> dict[str, str]:
    """Return the lower bounds of setup.py."""
    return lowest((ROOT / "setup.py").read_text())


def same(claimed: str, found: str) -> bool:
    """Return whether two versions are equal but for zeros at their ends."""
    return re.sub(r"(\.0)+$", "", claimed) == re.sub(r"(\.0)+$", "", found)


def test_lowest() -> None:
    assert lowest(CLAIMS) == {"numpy": "2.0", "torch": "2.4", "pyyaml": "6.0.1"}
    with pytest.raises(ValueError, match=r"torch>=2\.4 and >=2\.5"):
        lowest(f'{CLAIMS}MORE = ["torch>=2.5"]')


def test_the_page_is_what_the_record_says() -> None:
    script = runpy.run_path(str(DOCS / "versions_page.py"))
    text = (DOCS / "versions.md").read_text()
    assert script["page"](text, record()) == text, "run docs/versions_page.py --write"
    changed = script["page"](text, {**record(), "python": "3.99.0"})
    assert changed.count("with Python 3.99.0 on two ranks") == 1


def test_the_oldest_versions_that_ran_are_the_lower_bounds() -> None:
    ran, claimed = record()["packages"]["oldest"], claims()
    assert claimed.keys() - ran.keys() == NOT_RUN
    assert {name: ran[name] for name in ran if not same(claimed[name], ran[name])} == {}


def test_the_same_packages_ran_at_both_ends_and_all_passed() -> None:
    ran = record()
    assert ran["packages"]["oldest"].keys() == ran["packages"]["newest"].keys()
    both = {"oldest": "passed", "newest": "passed"}
    assert {title for title, ends in ran["runs"].items() if ends != both} == set()


def test_the_page_names_the_packages_that_did_not_run() -> None:
    text = (DOCS / "versions.md").read_text()
    names = {"wandb": "Weights & Biases", "pyspark": "Spark", "pyarrow": "Spark"}
    for name in NOT_RUN:
        assert names.get(name, name).lower() in text.lower()
