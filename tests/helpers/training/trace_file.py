"""A timeline's file, checked against the trace event format as it is read."""

import json
import socket
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "ph", "s", "ts", "pid", "tid"},
}


@dataclass(frozen=True)
class Slice:
    rank: int
    row: str
    phase: str
    subject: str
    start: float
    end: float
    args: dict[str, Any]

    @property
    def duration(self) -> float:
        return self.end - self.start


class Trace:
    def __init__(self, path: Path, np: int) -> None:
        self.content = json.loads(path.read_text())
        assert set(self.content) == {"traceEvents", "displayTimeUnit", "otherData"}
        self.events: list[dict[str, Any]] = self.content["traceEvents"]
        for event in self.events:
            assert set(event) == FIELDS[event["ph"]], event
            assert event["pid"] in range(np)
        assert self.names("process_name") == {
            (rank, 0): f"rank {rank} ({socket.gethostname()})" for rank in range(np)
        }
        rows = self.names("thread_name")
        slices = [_slice(e, rows) for e in self.events if e["ph"] == "X"]
        self.slices = sorted(slices, key=lambda one: (one.start, one.end))
        assert_no_overlap(self.events)

    def names(self, kind: str) -> dict[tuple[int, int], str]:
        named = [e for e in self.events if e["ph"] == "M" and e["name"] == kind]
        return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}

    def of(self, subject: str, phase: str) -> dict[int, list[Slice]]:
        found = defaultdict(list)
        for one in self.slices:
            if one.subject == subject and one.phase == phase:
                found[one.rank].append(one)
        return found

    def phases(self, rank: int, subject: str) -> list[str]:
        own = [s for s in self.slices if s.rank == rank and s.subject == subject]
        for before, after in pairwise(own):
            assert after.start == pytest.approx(before.end, abs=0.01)
        return [s.phase for s in own if s.phase != "queue"]


def _slice(event: dict[str, Any], rows: dict[tuple[int, int], str]) -> Slice:
    assert event["ts"] >= 0
    assert event["dur"] >= 0
    start, row = event["ts"], rows[event["pid"], event["tid"]]
    subject = event["name"].removeprefix(event["cat"]).strip()
    end = start + event["dur"]
    return Slice(event["pid"], row, event["cat"], subject, start, end, event["args"])


def assert_no_overlap(events: list[dict[str, Any]]) -> None:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        for (_, end), (start, _) in pairwise(row):
            assert end <= start + 0.01
