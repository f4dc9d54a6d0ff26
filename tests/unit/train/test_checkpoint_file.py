"""Checkpoint files open anywhere, run no code, and are never taken for whole when they are not."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint.file import (
    CheckpointName,
    load_checkpoint,
    position_of,
    write_checkpoint,
)
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary, read, write

TYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
]
NOT_OF_NUMPY = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
CONTENT = {
    "epoch": 3,
    "model": {"w": torch.arange(5.0), "half": torch.ones(3, dtype=torch.bfloat16)},
    "loss": float("inf"),
}


def same(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same type, shape and bytes."""
    left, right = (torch.as_tensor(tensor).contiguous().reshape(-1) for tensor in (one, other))
    equal = torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    kinds = [(type(tensor), tensor.dtype, tensor.shape) for tensor in (one, other)]
    return equal and kinds[0] == kinds[1]


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_every_type_and_layout_comes_back(tmp_path: Path, framework: TensorLibrary) -> None:
    tensors: dict[str, Any] = {}
    for name in TYPES:
        kind = getattr(torch, name)
        tensors |= {
            f"{name}, transposed": torch.arange(6).reshape(2, 3).to(kind).t(),
            f"{name}, one": torch.tensor(1).to(kind),
            f"{name}, none": torch.zeros(0, 3, dtype=kind),
        }
    if framework == "np":
        tensors = {n: t.numpy() for n, t in tensors.items() if n.split(",")[0] not in NOT_OF_NUMPY}
    path = tmp_path / "all"
    with open(path, "wb") as file:
        digest = write(file, tensors, {"about": "Zürich"})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found, metadata = read(path, framework)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    assert list(metadata) == ["about"]


def test_types_that_the_format_lacks_are_named(tmp_path: Path) -> None:
    with (
        open(tmp_path / "it", "wb") as file,
        pytest.raises(TypeError, match=r"x has .* complex128"),
    ):
        write(file, {"x": np.zeros(2, np.complex128)}, {})


def test_what_is_read_outlives_the_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, 0, CONTENT, "pt")
    content = load_checkpoint(path, "pt")
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(content["model"]["w"], torch.arange(5.0))


def test_others_can_open_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 3, 20, CONTENT, "pt")
    assert path.name.startswith("checkpoint-0003+20-")
    assert torch.equal(load_file(path)["model/w"], torch.arange(5.0))
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.get_tensor("model/half").dtype == torch.bfloat16
    content = load_checkpoint(path, "pt")
    assert (content["epoch"], content["loss"]) == (3, float("inf"))


def test_a_flipped_bit_of_any_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, 0, CONTENT, "pt")
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=f"{path.name} is damaged: its content is not"):
            load_checkpoint(path, "pt")
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=f"{path.name} is damaged"):
            load_checkpoint(path, "pt")


def test_a_renamed_file_is_proved_by_its_form(tmp_path: Path) -> None:
    """Without a digest, a bit of a tensor can change unseen; nothing else, and never a crash."""
    path = write_checkpoint(tmp_path, 1, 0, CONTENT, "pt").rename(tmp_path / "mine.safetensors")
    whole = path.read_bytes()
    assert load_checkpoint(path, "pt")["epoch"] == 3
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"mine\.safetensors is (damaged|not a checkpoint)"):
            load_checkpoint(path, "pt")
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 9]) + whole[position + 1 :])
        with suppress(UsageError):
            load_checkpoint(path, "pt")


class Trap:
    """Leaves a file behind where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path, sign = tmp_path / "trap.safetensors", tmp_path / "sprung"
    torch.save({"epoch": 1, "model": {}, "trap": Trap(sign)}, path)
    with pytest.raises(UsageError, match=r"trap\.safetensors is damaged"):
        load_checkpoint(path, "pt")
    assert not sign.exists()


def test_a_later_form_is_not_misread(tmp_path: Path) -> None:
    path = tmp_path / "later.safetensors"
    with open(path, "wb") as file:
        write(file, {}, {"hvdtrain": '{"version": 2}'})
    with pytest.raises(UsageError, match=r"later\.safetensors has version 2"):
        load_checkpoint(path, "pt")


def test_what_fails_leaves_no_file(tmp_path: Path) -> None:
    for wrong in ({"epoch": {1}}, {"epoch": torch.ones(2, dtype=torch.complex128)}):
        with pytest.raises(TypeError, match="epoch"):
            write_checkpoint(tmp_path, 1, 0, wrong, "pt")
    assert list(tmp_path.iterdir()) == []


def test_names() -> None:
    for epoch, samples, text in ((3, 0, "0003"), (12345, 600, "12345+600")):
        name = CheckpointName("best", epoch, samples, "0123456789abcdef")
        assert str(name) == f"best-{text}-0123456789abcdef.safetensors"
        assert CheckpointName.of(Path("dir") / str(name)) == name
        assert position_of(Path(str(name))) == (epoch, samples)
    for other in ("checkpoint-1.safetensors", "last-0001-0123456789abcdef.safetensors"):
        assert CheckpointName.of(Path(other)) is None
        assert position_of(Path(other)) == (-1, 0)
