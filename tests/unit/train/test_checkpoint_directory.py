"""Which checkpoints of a run are found, and which are kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.train.checkpoint.directory import (
    best_file,
    checkpoint_files,
    mark_best,
    newest_good,
    remove_old,
)
from hvdtrain.train.checkpoint.file import load_checkpoint, position_of, write_checkpoint


def save(directory: Path, epoch: int, samples: int = 0, value: int = 0) -> Path:
    content = {"epoch": epoch, "model": {"w": np.array([epoch, samples, value])}}
    return write_checkpoint(directory, epoch, samples, content, "np")


def places(directory: Path) -> list[tuple[int, int]]:
    return [position_of(path) for path in checkpoint_files(directory)]


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_newest_first_by_number(tmp_path: Path) -> None:
    for epoch, samples in ((9999, 7), (10000, 0), (9999, 0), (3, 50)):
        save(tmp_path, epoch, samples)
    (tmp_path / "checkpoint-4.safetensors").write_bytes(b"")
    assert places(tmp_path) == [(10000, 0), (9999, 7), (9999, 0), (3, 50)]
    assert checkpoint_files(tmp_path / "absent") == []


def test_the_newest_good_one_is_taken_and_the_bad_ones_are_named(tmp_path: Path) -> None:
    good, *bad = (save(tmp_path, epoch) for epoch in (1, 2, 3))
    spoil(bad[0])
    bad[1].write_bytes(b"")
    found = newest_good(tmp_path, "np")
    assert found.path == good
    assert found.content["model"]["w"].tolist() == [1, 0, 0]
    assert [bad[1].name in found.bad[0], bad[0].name in found.bad[1]] == [True, True]
    spoil(good)
    nothing = newest_good(tmp_path, "np")
    assert (nothing.path, nothing.content, len(nothing.bad)) == (None, {}, 3)


def test_the_best_one_is_a_way_back_too(tmp_path: Path) -> None:
    best = mark_best(save(tmp_path, 1))
    checkpoint_files(tmp_path)[0].unlink()
    spoil(save(tmp_path, 2))
    assert newest_good(tmp_path, "np").path == best


def test_there_is_one_best(tmp_path: Path) -> None:
    assert best_file(tmp_path) is None
    first = mark_best(save(tmp_path, 1))
    second = save(tmp_path, 2)
    assert best_file(tmp_path) == first
    best = mark_best(second)
    assert mark_best(second) == best
    assert best_file(tmp_path) == best
    assert not first.exists()
    assert load_checkpoint(best, "np")["epoch"] == 2
    assert places(tmp_path) == [(2, 0), (1, 0)]


def test_the_best_one_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:  # as FAT and some network file systems do
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    best = mark_best(save(tmp_path, 1))
    assert load_checkpoint(best, "np")["epoch"] == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_the_last_ones_and_the_best_one_stay(tmp_path: Path) -> None:
    for epoch in range(1, 6):
        written = save(tmp_path, epoch)
        if epoch == 2:
            mark_best(written)
        remove_old(written, keep=2)
    assert places(tmp_path) == [(5, 0), (4, 0)]
    best = best_file(tmp_path)
    assert best is not None
    assert load_checkpoint(best, "np")["epoch"] == 2


def test_one_of_the_same_place_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, value=1)
    newer = save(tmp_path, 1, value=2)
    remove_old(newer, keep=5)
    assert checkpoint_files(tmp_path) == [newer]


def test_damaged_ones_do_not_push_out_the_good_one(tmp_path: Path) -> None:
    """A run that had to go back goes on from there: what is later is of no use."""
    save(tmp_path, 5)
    for epoch in (6, 7):
        spoil(mark_best(save(tmp_path, epoch)))
    assert newest_good(tmp_path, "np").content["epoch"] == 5
    remove_old(save(tmp_path, 5, 100), keep=2)
    assert places(tmp_path) == [(5, 100), (5, 0)]
    assert best_file(tmp_path) is None
