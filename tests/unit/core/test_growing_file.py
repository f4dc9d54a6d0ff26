"""The file that a rank writes as it goes is whole after each write, whatever there was before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.core.timeline.file import merge_pieces
from hvdtrain.core.timeline.piece import (
    GrowingFile,
    earlier_path,
    find_pieces,
    piece_path,
    read_events,
    remove_pieces,
)

NAMES = st.lists(st.text(max_size=30), max_size=4)


def events(names: list[str], kind: str = "X") -> list[dict[str, Any]]:
    return [{"name": name, "ph": kind} for name in names]


def names_in(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


@settings(max_examples=40)
@given(st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=5))
def test_it_is_whole_after_each_write(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[list[str], list[str]]]
) -> None:
    path = tmp_path_factory.mktemp("growing") / "it.json"
    file = GrowingFile(str(path), {"a note": "[]"})
    lasting: list[str] = []
    for stay, pass_ in writes:
        file.write(events(stay), events([*pass_, "last"]))
        lasting += stay
        assert names_in(path) == [*lasting, *pass_, "last"]
        with open(path, encoding="utf-8") as lines:
            assert list(read_events(lines)) == events([*lasting, *pass_, "last"])
    file.close()
    assert json.loads(path.read_text())["otherData"] == {"a note": "[]"}


def test_a_file_whose_last_write_was_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = Path(piece_path(str(tmp_path / "it.json"), 0))
    file = GrowingFile(str(path), {})
    file.write(events(["a", "b" * 100]), events(["passing"]))
    file.close()
    path.write_text(path.read_text()[:150])
    merge_pieces(str(tmp_path / "it.json"), str(tmp_path / "out.json"))
    assert names_in(tmp_path / "out.json") == ["a"]


def test_one_that_grows_too_large_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    first, second = (piece_path(str(path), rank) for rank in (0, 10))
    file = GrowingFile(first, {}, most_bytes=200)
    for number in range(7):
        file.write(events([f"{number}" * 60]), [*events(["open"]), *events(["name"], "M")])
    file.close()
    other = GrowingFile(second, {})
    other.write([], events(["other"]))
    other.close()
    assert find_pieces(str(path)) == [Path(earlier_path(first)), Path(first), Path(second)]
    merge_pieces(str(path), str(path))
    earlier = ["4" * 60, "5" * 60, "name"]
    assert names_in(path) == [*earlier, "6" * 60, "open", "name", "other"]
    remove_pieces(str(path))
    assert list(tmp_path.iterdir()) == [path]
