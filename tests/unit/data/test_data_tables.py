"""Data from tables, texts and packages."""

import hashlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hvdtrain.data.characters import load_text
from hvdtrain.data.dataset import make_synthetic
from hvdtrain.data.digits import load_digits, stratified_split
from hvdtrain.data.parquet import read_shard
from hvdtrain.errors import UsageError

FILES = {"part-1": 7, "part-0": 0, "part-2": 12}


def write(folder: Path) -> int:
    first = 0
    for name, rows in sorted(FILES.items()):
        numbers = range(first, first + rows)
        table = pyarrow.table({"number": pyarrow.array(numbers, "int64"), "name": [name] * rows})
        table = table.cast(pyarrow.schema([("number", "int64"), ("name", "string")]))
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=5)
        first += rows
    (folder / "_SUCCESS").touch()
    return first


@pytest.mark.parametrize("size", [1, 2, 3, 4, 25])
def test_each_row_is_of_one_rank(size: int, tmp_path: Path) -> None:
    total = write(tmp_path)
    shards = [read_shard(tmp_path, rank, size) for rank in range(size)]
    numbers = [shard.column("number").to_pylist() for shard in shards]
    assert list(itertools.chain(*numbers)) == list(range(total))
    assert max(map(len, numbers)) - min(map(len, numbers)) <= 1
    assert {tuple(shard.schema.names) for shard in shards} == {("number", "name")}


def test_some_columns(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_shard(tmp_path, 1, 2, ["name"]).schema.names == ["name"]
    with pytest.raises(UsageError, match="has no column weight: number, name"):
        read_shard(tmp_path, 0, 2, ["number", "weight"])


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there are no files \*\.parquet in "):
        read_shard(tmp_path, 0, 1)


TEXT = "abcé\n" * 40


def test_windows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    text = load_text(tmp_path, context=7)
    assert list(text.vocabulary) == ["\n", "a", "b", "c", "é"]
    spelled = ["".join(text.vocabulary[token] for token in text.train[i][0]) for i in range(25)]
    assert len(text.train) == 25  # of 180 characters, the last of which are only a target
    assert "".join(spelled) == TEXT[:175]
    for index in range(25):
        inputs, targets = text.train[index]
        assert inputs.shape == targets.shape == (7,)
        assert "".join(text.vocabulary[t] for t in targets) == TEXT[index * 7 + 1 :][:7]
    assert len(text.test) == 2
    assert "".join(text.vocabulary[token] for token in text.test[0][0]) == TEXT[180:187]


def test_which_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="text needs --data-dir DIR, with one file that ends in"):
        load_text(None, 7)
    with pytest.raises(UsageError, match=rf"text: \*\.txt not found in {tmp_path}; expected"):
        load_text(tmp_path, 7)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 50)
    with pytest.raises(UsageError, match=r"has a.txt, b.txt; name one of them"):
        load_text(tmp_path, 7)
    assert "b" in load_text(tmp_path, 7, "b.txt").vocabulary
    assert "b" in load_text(tmp_path / "b.txt", 7).vocabulary
    with pytest.raises(UsageError, match=r"text: c\.txt not found"):
        load_text(tmp_path, 7, "c.txt")


@pytest.mark.parametrize(
    ("content", "context", "fault"),
    [
        (b"", 7, "has 0 characters: too few for windows of 7"),
        (b"x" * 70, 7, "has 70 characters: too few"),
        (b"ab\xff", 1, "is not text in UTF-8: byte 2 is invalid"),
        (b"abc", 0, "context must be at least 1, got 0"),
    ],
)
def test_bad_texts(tmp_path: Path, content: bytes, context: int, fault: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UsageError, match=fault):
        load_text(tmp_path, context)


def test_synthetic() -> None:
    data = make_synthetic(2000, (3, 4, 4), classes=6, seed=1)
    again = make_synthetic(2000, (3, 4, 4), classes=6, seed=1)
    assert data.train.inputs.shape == (2000, 3, 4, 4)
    assert len(data.test) == 200
    assert data.train.inputs.dtype == np.float32
    assert np.array_equal(data.test.inputs, again.test.inputs)
    assert set(data.train.labels.tolist()) == set(range(6))
    # 8 of the 48 places carry the label: their sum tells it, in nearly all cases.
    sums = data.test.inputs.reshape(200, 8, 6).sum(axis=1)
    assert np.mean(sums.argmax(axis=1) == data.test.labels) > 0.8
    assert not np.array_equal(make_synthetic(9, (2,), 2, 1).train.inputs, 0)
    with pytest.raises(UsageError, match="classes must be at least 1, got 0"):
        make_synthetic(9, (2,), 0)
    with pytest.raises(UsageError, match="shape must be at least 1, got 0"):
        make_synthetic(9, (), 2)


def test_images_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits as reference

    data, raw = load_digits(), reference()
    ours = np.concatenate([data.train.inputs, data.test.inputs]).reshape(-1, 64) * 16
    rows = np.column_stack([ours, np.concatenate([data.train.labels, data.test.labels])])
    expected = np.column_stack([raw.data, raw.target])
    assert sorted(map(tuple, rows)) == sorted(map(tuple, expected))


def test_split_never_changes() -> None:
    labels = np.concatenate([load_digits().train.labels, load_digits().test.labels])
    assert hashlib.sha256(labels.tobytes()).hexdigest()[:16] == "0181c4517ab5dca1"


def test_split_is_stratified_and_a_partition() -> None:
    labels = np.repeat([0, 1, 2], [103, 52, 9]).astype(np.int64)
    train, test = stratified_split(labels, 0.2, seed=0)
    assert sorted([*train, *test]) == list(range(164))
    assert len(test) == 33  # the smallest whole number that is at least a fifth
    for label, quota in enumerate((20.6, 10.4, 1.8)):
        assert abs(np.count_nonzero(labels[test] == label) - quota) < 1


def test_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    with pytest.raises(UsageError, match="pip install scikit-learn"):
        load_digits()
