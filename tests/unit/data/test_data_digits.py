"""The digits data: shape, range, and a split that never changes."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest

from hvdtrain.data.digits import load_digits, stratified_split
from hvdtrain.errors import UsageError


def test_images_and_labels() -> None:
    data = load_digits()
    assert data.train.inputs.shape == (1437, 1, 8, 8)
    assert data.test.inputs.shape == (360, 1, 8, 8)
    assert data.train.inputs.dtype == np.float32
    assert data.train.labels.dtype == np.int64
    assert (data.train.inputs.min(), data.train.inputs.max()) == (0.0, 1.0)
    assert set(data.test.labels.tolist()) == set(range(10))


def test_images_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits as reference

    data, raw = load_digits(), reference()
    ours = np.concatenate([data.train.inputs, data.test.inputs]).reshape(-1, 64) * 16
    labels = np.concatenate([data.train.labels, data.test.labels])
    rows = np.column_stack([ours, labels])
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
