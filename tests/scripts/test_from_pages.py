"""The script of docs/other-libraries.md gives the same numbers on two ranks as on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other-libraries.md"


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_a_contrastive_loss(size: int, tmp_path: Path) -> None:
    """One rank and two come to the same numbers: those of all samples."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    script = tmp_path / "script.py"
    script.write_text(code)
    done = run_ranks(script, size, cases_expected=False, cwd=tmp_path, env={"OMP_NUM_THREADS": 1})
    said = re.findall(r"^contrast: ([\d.]+), gradient ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(said) == size
    assert len(set(said)) == 1  # the same on all ranks
    assert [float(number) for number in said[0]] == pytest.approx([1.6948, 1.8496], abs=1e-3)
