"""Checkpoint files open anywhere, run no code, and are never taken for whole when they are not."""

import errno
import hashlib
import json
import math
import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.train import checkpoints
from hvdtrain.train.checkpoints import (
    TensorLibrary,
    flatten,
    load_checkpoint,
    position_of,
    read_tensors,
    unflatten,
    write_checkpoint,
    write_tensors,
)

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
    left, right = (torch.as_tensor(tensor).clone().reshape(-1) for tensor in (one, other))
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
    else:  # torch marks these, and conjugates or negates them when they are read
        marked = torch.tensor([[1 + 2j, 3 + 4j]]).mH
        tensors |= {"complex64, conjugated": marked, "float32, negated": marked.imag}
    path = tmp_path / "all"
    with open(path, "wb") as file:
        digest = write_tensors(file, tensors, {"about": "Zürich"})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found, metadata = read_tensors(path, framework)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    assert list(metadata) == ["about"]


def test_what_is_read_outlives_the_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, 0, CONTENT, "pt")
    content = load_checkpoint(path, "pt")
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(content["model"]["w"], torch.arange(5.0))


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
        write_tensors(file, {}, {"hvdtrain": '{"version": 2}'})
    with pytest.raises(UsageError, match=r"later\.safetensors has format version 2"):
        load_checkpoint(path, "pt")


def test_what_fails_leaves_no_file(tmp_path: Path) -> None:
    for wrong in ({"epoch": {1}}, {"epoch": torch.ones(2, dtype=torch.complex128)}):
        with pytest.raises(TypeError, match="epoch"):
            write_checkpoint(tmp_path, 1, 0, wrong, "pt")
    assert list(tmp_path.iterdir()) == []


def assert_same(one: Any, other: Any) -> None:
    """Check for equal types and values all the way down; tensors are the very same."""
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, float):
        assert math.isnan(one) if math.isnan(other) else repr(one) == repr(other)
    elif hasattr(one, "shape"):
        assert one is other
    else:
        assert one == other


# Whatever keys there are, and what JSON has no words for.
KEYS = st.text(max_size=3) | st.integers(-3, 3) | st.sampled_from(["$tensor", "$dict", "a/b", ""])
TENSORS = [torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), np.array([7, 2**32 - 1], np.uint32)]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(TENSORS)
CONTENTS = st.recursive(
    LEAVES | st.text(max_size=4),
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(CONTENTS)
def test_what_is_taken_apart_comes_together_again(content: Any) -> None:
    tensors, skeleton = flatten(content)
    assert_same(content, unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), tensors))
    for name in tensors:
        name.encode()  # a name is text that any program can read
        assert name != "__metadata__"


def test_what_stands_for_something_plain_becomes_it() -> None:
    content = {"lr": np.float64(0.5), "steps": np.int64(3), "d": OrderedDict(a=1)}
    tensors, skeleton = flatten(content)
    assert_same({"lr": 0.5, "steps": 3, "d": {"a": 1}}, unflatten(skeleton, tensors))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": [{1, 2}]}, "a/0 is a set, which"),
        ({"a": {"f": print}}, "a/f is a builtin_function_or_method, which"),
        ({"a": {(1, 2): 0}}, r"a has the key \(1, 2\)"),
    ],
)
def test_what_cannot_be_kept_is_named(content: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flatten(content)


def save(directory: Path, epoch: int, samples: int = 0, value: int = 0) -> Path:
    content = {"epoch": epoch, "model": {"w": np.array([epoch, samples, value])}}
    return write_checkpoint(directory, epoch, samples, content, "np")


def places(directory: Path) -> list[tuple[int, int]]:
    return [position_of(path) for path in checkpoints.checkpoint_files(directory)]


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_the_best_one_is_a_way_back_too(tmp_path: Path) -> None:
    best = checkpoints.mark_best(save(tmp_path, 1))
    checkpoints.checkpoint_files(tmp_path)[0].unlink()
    spoil(save(tmp_path, 2))
    assert checkpoints.newest_good(tmp_path, "np").path == best


def test_the_best_one_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:  # as FAT and some network file systems do
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert load_checkpoint(checkpoints.mark_best(save(tmp_path, 1)), "np")["epoch"] == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_damaged_ones_do_not_push_out_the_good_one(tmp_path: Path) -> None:
    """A run that had to go back goes on from there: what is later is of no use."""
    save(tmp_path, 5)
    for epoch in (6, 7):
        spoil(checkpoints.mark_best(save(tmp_path, epoch)))
    assert checkpoints.newest_good(tmp_path, "np").content["epoch"] == 5
    checkpoints.remove_old(save(tmp_path, 5, 100), keep=2)
    assert places(tmp_path) == [(5, 100), (5, 0)]
    assert checkpoints.best_file(tmp_path) is None
