"""The compiled kernels of one process, driven at random and watched by sanitizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiling import copy_kernel, run_watched

import hvdtrain.engines.shared_memory.kernel as node
from hvdtrain.compiled import KernelError
from hvdtrain.core.exchanges import codes
from hvdtrain.core.sharding import kernel as update

HERE = Path(__file__).parent
NODE, CODES, UPDATE = (
    Path(str(module.__file__)).with_name(name)
    for module, name in (
        (node, "node_kernel.c"),
        (codes, "codes_kernel.c"),
        (update, "update_kernel.c"),
    )
)
DRIVERS = {"placed_driver.c": NODE, "codes_driver.c": CODES, "update_driver.c": UPDATE}
# By driver and file: what is written otherwise.
FAULTS = [
    ("placed_driver.c", "node/placed.h", "(int64_t)rows[0]);", "(int64_t)rows[0] + 1);"),
    (
        *("codes_driver.c", "codes_kernel.c", "return left < 0 ? 0 : left < bytes ? left : bytes;"),
        "return bytes;",
    ),
    ("update_driver.c", "update_kernel.c", "ROOM (BLOCK + LINE)", "ROOM (BLOCK - 1)"),
]


@pytest.mark.parametrize("driver", DRIVERS)
def test_memory_and_arithmetic_are_in_order(driver: str, tmp_path: Path) -> None:
    done = run_watched(HERE / driver, DRIVERS[driver], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("driver", "file", "before", "after"), FAULTS)
def test_a_fault_is_reported(
    driver: str, file: str, before: str, after: str, tmp_path: Path
) -> None:
    """So that the runs above can fail."""
    source = copy_kernel(DRIVERS[driver], tmp_path)
    mutated = source.parent / file
    text = mutated.read_text(encoding="utf-8")
    assert text.count(before) == 1
    mutated.write_text(text.replace(before, after), encoding="utf-8")
    done = run_watched(HERE / driver, source, tmp_path)
    assert done.returncode != 0
    assert "overflow" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("module", "mark", "source"),
    [(codes, b"arithmetic of codes", CODES), (update, b"step on segments", UPDATE)],
)
def test_a_kernel_of_another_version_is_refused(
    module: Any, mark: bytes, source: Path, tmp_path: Path
) -> None:
    """The one of this version is there: where a compiler is, installing builds it."""
    load: Callable[[], Any] = module.load_kernel
    whole = Path(load()._name).read_bytes()
    (tmp_path / "old.so").write_bytes(whole.replace(mark, mark.capitalize()))
    text = rf"old\.so was not compiled from .*{source.name}: install"
    with pytest.raises(KernelError, match=text):
        module.open_kernel(tmp_path / "old.so")
