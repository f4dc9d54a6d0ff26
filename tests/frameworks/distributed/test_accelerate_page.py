"""docs/accelerate.md: its programs run under `exec`, on gloo and on hvdtrain's backend."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from ranks import run_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "accelerate.md"
START, ACCELERATE, TRANSFORMERS = re.findall(
    r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
BACKEND = "\nassert torch.distributed.get_backend() == {!r}\n"
QUIET = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "PYTHONWARNINGS": "ignore"}


def run(program: str, backend: str, np: int, folder: Path, python: Path | None = None) -> str:
    """Run a program of the page on a backend, and return what it printed."""
    begin = START if backend == "hvdtrain" else "import torch\n"
    if backend == "gloo" and program == TRANSFORMERS:
        begin += 'torch.distributed.init_process_group("gloo")\n'  # it asks for the size early
    script = folder / f"{backend}_{np}.py"
    script.write_text(begin + program + BACKEND.format(backend))
    words = ["-m", "hvdtrain", "exec", str(script)]
    return run_ranks(words, np, env=QUIET, python=python).stdout


def test_accelerate(tmp_path: Path) -> None:
    """Ranks of both backends have one error, over all 23 samples, and one rank has it too."""
    found = {
        (backend, np): re.findall(
            r"rank \d: error (\d\.\d+)", run(ACCELERATE, backend, np, tmp_path)
        )
        for backend, np in (("hvdtrain", 2), ("gloo", 2))
    }
    (error,) = {error for errors in found.values() for error in errors}
    assert [len(errors) for errors in found.values()] == [2, 2]
    assert 0 < float(error) < 0.6


@pytest.mark.transformers
def test_transformers(tmp_path: Path) -> None:
    """One rank and two have equal weights, on both backends."""
    named = os.environ.get("HVDTRAIN_TRANSFORMERS_PYTHON")
    if not named:
        pytest.skip("HVDTRAIN_TRANSFORMERS_PYTHON names no environment with transformers")
    norms = []
    for backend, np in (("hvdtrain", 1), ("hvdtrain", 2), ("gloo", 2)):
        said = run(TRANSFORMERS, backend, np, tmp_path, Path(named))
        lines = re.findall(rf"rank \d of {np}: (\d+\.\d+)", said)
        assert len(lines) == np, said
        norms += map(float, lines)
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-6)
