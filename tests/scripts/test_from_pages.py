"""docs/from: what stands on the right of a table is in the example that the page names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks

FROM = Path(__file__).resolve().parents[2] / "docs" / "from"


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_hvdtrain_inside_other_libraries(size: int, tmp_path: Path) -> None:
    """One rank and two come to the same numbers: those of all samples."""
    page = (FROM.parent / "other-libraries.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    script = tmp_path / "script.py"
    script.write_text("".join(blocks))
    done = run_ranks(script, size, cases_expected=False, cwd=tmp_path, env={"OMP_NUM_THREADS": 1})
    said = re.findall(r"^(\w+): ([\d.e-]+)(?:, gradient (.*))?$", done.stdout, re.MULTILINE)
    assert len(said) == 3 * size
    found = {name: (float(value), float(gradient or 0)) for name, value, gradient in said}
    assert len(set(said)) == len(found)  # the same on all ranks
    # What one rank comes to.
    assert found["Lightning"][0] == pytest.approx(4.929e-3, rel=0.01)
    assert found["LBFGS"][0] == pytest.approx(0.138, abs=1e-3)
    assert found["contrast"] == pytest.approx((1.235, 1.4301), abs=1e-3)
