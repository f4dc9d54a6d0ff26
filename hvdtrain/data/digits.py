"""scikit-learn's digits: 1,797 images of handwritten digits, 8 x 8, that come with the package."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.errors import UsageError

__all__ = ["load_digits", "stratified_split"]

_SPLIT_SEED = 20240229
_TEST_FRACTION = 0.2
_BRIGHTEST = 16.0


def load_digits() -> Dataset:
    """Load the images, float32 [n, 1, 8, 8] in [0, 1], in a fixed stratified 80/20 split.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    table = np.loadtxt(_table_of_scikit_learn(), delimiter=",", dtype=np.float32)
    images = table[:, :-1].reshape(-1, 1, 8, 8) / np.float32(_BRIGHTEST)
    labels = table[:, -1].astype(np.int64)
    train, test = stratified_split(labels, _TEST_FRACTION, _SPLIT_SEED)
    return Dataset(Samples(images[train], labels[train]), Samples(images[test], labels[test]))


def _table_of_scikit_learn() -> Path:
    """Find the file among scikit-learn's modules, without importing them (a second per rank)."""
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    for folder in folders or []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise UsageError(
        "the digits data come with scikit-learn, which is not installed: pip install scikit-learn"
    )


def stratified_split(
    labels: npt.NDArray[np.int64], test_fraction: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split indices so that every label has the same share of test samples, up to rounding.

    Of n samples ceil(n * test_fraction) are test samples; those left over by rounding down go to
    the labels with the largest remainders.

    Args:
        labels: int64 labels, [n].
        test_fraction: share of each label in the test part, in (0, 1).
        seed: seed of the split.

    Returns:
        Sorted int64 indices of the training part and of the test part.
    """
    generator = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    quotas = counts * test_fraction
    takes = np.floor(quotas).astype(np.int64)
    left_over = math.ceil(len(labels) * test_fraction) - int(takes.sum())
    takes[np.argsort(takes - quotas, kind="stable")[:left_over]] += 1
    is_test = np.zeros(len(labels), dtype=bool)
    for label, take in zip(classes, takes, strict=True):
        is_test[generator.permutation(np.flatnonzero(labels == label))[:take]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
