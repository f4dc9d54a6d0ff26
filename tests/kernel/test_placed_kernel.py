"""The compiled addition of pieces that lie anywhere, watched by sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiling import copy_kernel, run_watched

import hvdtrain.engines.shared_memory.kernel

SOURCE = Path(hvdtrain.engines.shared_memory.kernel.__file__).with_name("node_kernel.c")
DRIVER = Path(__file__).with_name("placed_driver.c")


def test_memory_and_sums_are_in_order(tmp_path: Path) -> None:
    done = run_watched(DRIVER, SOURCE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("(int64_t)rows[0]);", "(int64_t)rows[0] + 1);", "heap-buffer-overflow"),
        ("rows[1 + sources + k]", "rows[1 + k]", "wrong elements"),
    ],
)
def test_a_fault_is_reported(before: str, after: str, said: str, tmp_path: Path) -> None:
    """So that the run above can fail."""
    placed = copy_kernel(SOURCE, tmp_path).with_name("node") / "placed.h"
    text = placed.read_text(encoding="utf-8")
    assert text.count(before) == 1
    placed.write_text(text.replace(before, after), encoding="utf-8")
    done = run_watched(DRIVER, placed.parent.with_name(SOURCE.name), tmp_path)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
