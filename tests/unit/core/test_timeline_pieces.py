"""Pieces of a timeline that cannot be written, and those that a job finds when it begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.core.timeline.piece import GrowingFile, PieceWriter, earlier_path, piece_path
from hvdtrain.core.timeline.start_stop import begin
from hvdtrain.core.timeline.times import RankRecords, Reading
from hvdtrain.engines.local import LocalCommunicator

CLOCK = Reading(100.0, 0.0, 1e-6)
TITLE = "[rank 1/2]"


def begun(file: GrowingFile) -> PieceWriter:
    times = RankRecords(CLOCK, CLOCK, 0.0)
    return PieceWriter(file, times, lambda: times, TITLE, 1, "host")


def write_piece(path: str) -> None:
    file = GrowingFile(path, {})
    file.write([], [{"name": "old", "ph": "X"}])
    file.close()


class SecondCommunicator(LocalCommunicator):
    """Rank 1, as if alone."""

    rank = 1


@pytest.fixture
def beginning() -> Iterator[Any]:
    """Begin to record as a rank, and end it."""
    recordings = []

    def start(communicator: LocalCommunicator, path: Path) -> None:
        recordings.append(begin(communicator, str(path), False, "host"))

    yield start
    for recording in recordings:
        recording.finish()


def test_whatever_a_write_raises_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = GrowingFile(str(tmp_path / "piece"), {})
    piece = begun(file)
    file.close()
    piece.save()
    piece.save()
    piece.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{TITLE} timeline: {tmp_path}/piece ends here: ValueError(")
    piece.remove()
    assert list(tmp_path.iterdir()) == []


def test_each_rank_removes_its_own_old_pieces(tmp_path: Path, beginning: Any) -> None:
    path = tmp_path / "it.json"
    own, other = (piece_path(str(path), rank) for rank in (1, 2))
    for each in (own, earlier_path(own), other):
        write_piece(each)
    beginning(SecondCommunicator(), path)
    assert {str(each) for each in tmp_path.iterdir()} == {own, other}
    assert '"old"' not in Path(own).read_text()


def test_files_that_others_write_stay(tmp_path: Path, beginning: Any) -> None:
    path = tmp_path / "it.json"
    old, profile = (piece_path(str(path), rank) for rank in (6, 7))
    write_piece(old)
    Path(profile).write_text('{\n  "schemaVersion": 1, "displayTimeUnit": "ms"}')
    beginning(LocalCommunicator(), path)
    assert {str(each) for each in tmp_path.iterdir()} == {piece_path(str(path), 0), profile}
