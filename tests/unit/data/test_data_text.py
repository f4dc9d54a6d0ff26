"""A text by characters, and data that are made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdtrain.data.characters import load_text
from hvdtrain.data.synthetic import make_synthetic
from hvdtrain.errors import UsageError

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
