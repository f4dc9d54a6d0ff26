"""The compiled kernels of one process, driven at random and watched by sanitizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compiling import run_watched

import hvdtrain.engines.shared_memory.kernel as node
from hvdtrain.compiled import KernelError
from hvdtrain.core import update_kernel as update
from hvdtrain.core.exchanges import codes

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


@pytest.mark.parametrize("driver", DRIVERS)
def test_memory_and_arithmetic_are_in_order(driver: str, tmp_path: Path) -> None:
    done = run_watched(HERE / driver, DRIVERS[driver], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


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
