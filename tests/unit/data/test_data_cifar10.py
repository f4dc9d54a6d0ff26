"""CIFAR-10's files in both versions, and what a pickle of someone else's cannot do."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from data_files import python_batch, write_cifar10

from hvdtrain.data.cifar10 import load_cifar10
from hvdtrain.errors import UsageError

MEAN = np.array([0.485, 0.456, 0.406])[:, None, None]
DEVIATION = np.array([0.229, 0.224, 0.225])[:, None, None]


@pytest.mark.parametrize(
    ("inner", "python"),
    [(".", False), (".", True), ("cifar-10-batches-bin", False), ("cifar-10-batches-py", True)],
)
def test_both_versions(tmp_path: Path, inner: str, python: bool) -> None:
    (tmp_path / inner).mkdir(exist_ok=True)
    images, labels = write_cifar10(tmp_path / inner, 4, python)
    data = load_cifar10(tmp_path)
    expected = (images.reshape(-1, 3, 32, 32) / 255 - MEAN) / DEVIATION
    assert np.allclose(data.train.inputs, expected[:20], atol=1e-5)
    assert np.allclose(data.test.inputs, expected[20:], atol=1e-5)
    assert data.train.inputs.dtype == np.float32
    assert [*data.train.labels, *data.test.labels] == labels.tolist()


def test_where_files_are_expected(tmp_path: Path) -> None:
    layout = r"data_batch_1.bin to data_batch_5.bin and test_batch.bin \(the binary version\)"
    with pytest.raises(UsageError, match=f"cifar10 needs --data-dir DIR, with {layout}"):
        load_cifar10(None)
    with pytest.raises(UsageError, match=f"data_batch_1.bin, data_batch_1 not found .*{layout}"):
        load_cifar10(tmp_path)
    write_cifar10(tmp_path, 1, python=False)
    for gone in (3, 4):
        (tmp_path / f"data_batch_{gone}.bin").unlink()
    with pytest.raises(
        UsageError, match=f"data_batch_3.bin, data_batch_4.bin not found in {tmp_path}; .*{layout}"
    ):
        load_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (bytes(3072), "its 3072 bytes are not a multiple of 3073"),
        (b"", "has no images"),
        (bytes(3073) + b"\x0a" + bytes(3072), "label 10 of image 1 is not from 0 to 9"),
    ],
)
def test_damaged_binary_batches(tmp_path: Path, content: bytes, fault: str) -> None:
    write_cifar10(tmp_path, 1, python=False)
    (tmp_path / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(UsageError, match=f"{tmp_path}/data_batch_2.bin.* {fault}"):
        load_cifar10(tmp_path)


class Evil:
    """Touches a file when it is unpickled in the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return Path.touch, (self.path,)


ROW, LABEL = np.zeros((1, 3072), np.uint8), np.array([3], np.uint8)
GOOD = python_batch(ROW, LABEL)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (GOOD[:-100], "truncated"),
        (b"", "Ran out of input"),
        (b"no pickle", "UnpicklingError|invalid"),
        (pickle.dumps([1, 2]), "TypeError"),
        (pickle.dumps({}), "KeyError"),
        (GOOD.replace(b"u1", b"f4"), "not rows of unsigned bytes"),
        (python_batch(ROW[:, :5], LABEL), "cannot reshape"),
        (GOOD.replace(b"numpy\nndarray", b"numpy\nmemmap"), "it names numpy.memmap"),
        (python_batch(ROW, np.array([10], np.uint8)), "label 10 of image 0 is not from 0 to 9"),
    ],
)
def test_damaged_python_batches(tmp_path: Path, content: bytes, fault: str) -> None:
    write_cifar10(tmp_path, 1, python=True)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(UsageError, match=f"{tmp_path}/test_batch.*({fault})") as error:
        load_cifar10(tmp_path)
    assert "\n" not in str(error.value)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    write_cifar10(tmp_path, 1, python=True)
    evil, mark = pickle.dumps(Evil(tmp_path / "touched"), protocol=2), tmp_path / "touched"
    (tmp_path / "data_batch_1").write_bytes(evil)
    with pytest.raises(UsageError, match=r"data_batch_1 is damaged .* which no such batch needs"):
        load_cifar10(tmp_path)
    assert not mark.exists()
    pickle.loads(evil)  # else it would prove nothing
    assert mark.exists()
