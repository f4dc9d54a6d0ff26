"""The compiled arithmetic of codes, for each instruction set, and watched by sanitizers."""

from pathlib import Path

import numpy as np
import pytest
from coded_rows import LENGTHS, coded_by_arrays, coded_by_kernel, rows_of_all_kinds
from compiling import LEVELS, compile_library, supports

from hvdtrain.core.exchanges import codes
from hvdtrain.core.exchanges.codes import BITS

SOURCE = Path(codes.__file__).with_name("codes_kernel.c")


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
