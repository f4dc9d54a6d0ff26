"""The compiled arithmetic of codes, for each instruction set, and watched by sanitizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from coded_rows import LENGTHS, coded_by_arrays, coded_by_kernel, rows_of_all_kinds
from compiling import LEVELS, compile_library, copy_kernel, run_watched, supports

from hvdtrain.compiled.library import KernelError
from hvdtrain.core.exchanges import codes
from hvdtrain.core.exchanges.codes import BITS

SOURCE = Path(codes.__file__).with_name("codes_kernel.c")
DRIVER = Path(__file__).with_name("codes_driver.c")


def test_the_kernel_is_there() -> None:
    """Where a compiler is, installing builds it; without it numpy codes."""
    assert codes.load_kernel() is not None


@pytest.mark.parametrize("level", LEVELS)
def test_all_instruction_sets_give_the_bits_of_numpy(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not supports(level):
        pytest.skip(f"this processor lacks instructions of {level}")
    path = tmp_path / "codes.so"
    compile_library(SOURCE, level, path)
    library = codes.open_kernel(path)
    monkeypatch.setattr(codes, "load_kernel", lambda: library)
    for kind in (np.float32, np.float64):
        for length in LENGTHS:
            rows = rows_of_all_kinds(length, kind)
            for bits in BITS:
                expected = coded_by_arrays(rows.copy(), bits)
                for one, other in zip(coded_by_kernel(rows.copy(), bits), expected, strict=True):
                    assert one.tobytes() == other.tobytes()


def test_memory_and_arithmetic_are_in_order(tmp_path: Path) -> None:
    done = run_watched(DRIVER, SOURCE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("return left < 0 ? 0 : left < bytes ? left : bytes;", "return bytes;", "overflow"),
        ("level = level < outermost ? level : outermost;", "", "outside the range"),
    ],
)
def test_a_fault_is_reported(before: str, after: str, said: str, tmp_path: Path) -> None:
    """So that the run above can fail."""
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(before) == 1
    mutated = copy_kernel(SOURCE, tmp_path)
    mutated.write_text(text.replace(before, after), encoding="utf-8")
    done = run_watched(DRIVER, mutated, tmp_path)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr


def test_a_kernel_of_another_version_is_refused(tmp_path: Path) -> None:
    library = codes.load_kernel()
    whole = Path(library._name if library else "").read_bytes()
    (tmp_path / "old.so").write_bytes(whole.replace(b"arithmetic of codes", b"Arithmetic of codes"))
    with pytest.raises(
        KernelError, match=r"old\.so was not compiled from .*codes_kernel\.c: install"
    ):
        codes.open_kernel(tmp_path / "old.so")
