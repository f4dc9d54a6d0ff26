"""A timeline: its rows, the file that grows, and the pieces of ranks."""

import json
import os
import pickle
import re
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hvdtrain_report.flight import read_ranks, record_files, write_for_torch
from hvdtrain_report.why import judge
from hvdtrain_report.why_command import command as why

from hvdtrain.core import context
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.timeline.file import (
    GrowingFile,
    PieceWriter,
    TimelineError,
    earlier_path,
    find_pieces,
    merge_pieces,
    piece_path,
    remove_pieces,
    usable_path,
    write,
)
from hvdtrain.core.timeline.flight import FlightRecord
from hvdtrain.core.timeline.records import (
    ChannelTimes,
    OperationTimes,
    RankRecords,
    Reading,
    Records,
)
from hvdtrain.core.timeline.start_stop import Recording, begin
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.flight_layout import BLOCK_BYTES, LIFE
from hvdtrain.topology import Topology

CLOCK = Reading(100.0, 0.0, 1e-6)


def operation(*times: float | None, ended: float) -> OperationTimes:
    submitted, proposed, agreed, began = (*times, None, None, None, None)[:4]
    assert submitted is not None
    return OperationTimes("allreduce", "x", "sum", 8, submitted, proposed, agreed, began, ended, "")


def times_of(operations: Records[OperationTimes]) -> RankRecords:
    """Return what a rank with one channel has recorded from second 100 to second 200."""
    stop = Reading(200.0, 0.0, 1e-6)
    return RankRecords(CLOCK, stop, CLOCK.at_seconds, [ChannelTimes("world", "world", operations)])


def written(path: Path, *ranks: RankRecords) -> list[dict[str, object]]:
    hosts = [f"host{rank}" for rank in range(len(ranks))]
    write(str(path), [pickle.dumps(times) for times in ranks], hosts)
    events: list[dict[str, object]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_operations_that_overlap_are_in_rows_of_their_own(tmp_path: Path) -> None:
    records: Records[OperationTimes] = Records()
    for start, end in ((101, 104), (102, 103), (103, 106), (104, 105), (106, 107)):
        records.append(operation(start, start, end, end, ended=end))
    events = written(tmp_path / "it.json", times_of(records))
    rows = {
        e["tid"]: [s["ts"] for s in events if s["tid"] == e["tid"] and s.get("cat") == "moving"]
        for e in events
        if e["name"] == "thread_name"
    }
    assert rows == {1: [], 2: [4e6, 5e6, 7e6], 3: [3e6, 6e6]}


def flight_record(folder: Path, rank: int = 0, job: int = 7) -> FlightRecord:
    topology = Topology.from_nodes(rank, [0, 0], [socket.gethostname()] * 2)
    return FlightRecord(str(folder), topology, "mpi", job)


def test_a_flight_record_begins_with_the_same_operation_on_all_ranks(tmp_path: Path) -> None:
    """If ranks are an operation apart, and whatever failed on one of them."""
    records = [flight_record(tmp_path, rank) for rank in range(2)]
    ahead, behind = (record.history(range(2), 0, "world") for record in records)
    for number in range(2500):
        for history in (ahead, behind)[: 1 + (number < 2499)]:
            operation = Work(Request("barrier", str(number)))
            history.submitted(operation)
            history.ended(operation, failed=False)
    ahead.submitted(failed := Work(Request("barrier", "failed")))
    ahead.ended(failed, failed=True)
    pending = [Work(Request("barrier", name)) for name in ("waits", "runs", "runs too")]
    for operation in pending:
        ahead.submitted(operation)
    for operation in pending[1:]:
        ahead.began(operation)
    write_for_torch(read_ranks(record_files(tmp_path)), tmp_path / "torch")
    names, numbers = [], []
    for rank in range(2):
        entries = json.loads((tmp_path / "torch" / f"flight_rank_{rank}").read_text())["entries"]
        names.append([entry["profiling_name"].partition("'")[2][:-1] for entry in entries])
        numbers.append([entry["record_id"] for entry in entries])
    assert names[0][:-4] == [*names[1], "2499"]
    assert numbers[0][0] == numbers[1][0] > 1500
    assert names[0][-4:-2] == ["runs", "runs too"]
    assert numbers[0][-5:-2] == [2500, 2501, 2502]
    assert sorted(names[0][-2:]) == ["failed", "waits"]
    for record in records:
        record.close()
    assert not record_files(tmp_path)


@pytest.mark.parametrize(
    ("text", "cause"),
    [("KeyboardInterrupt", "stall"), ("ValueError: \udc80\0" + '"\u20ac' * 2000, "error")],
)
def test_a_failure_after_a_stall_is_the_first_one(
    text: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And has room after many stalls; an error of any rank keeps the file."""
    first, second = (flight_record(tmp_path, rank) for rank in range(2))
    for seconds in range(100):
        first.note("stall", f"allreduce 'loss' for {seconds} s: rank 0 waits for rank 1")
    (path,) = record_files(tmp_path)
    assert "for 99 s" in judge(read_ranks([path]), None).what
    assert not why.main([str(tmp_path)], standalone_mode=False)
    runs, stalls, *_ = capsys.readouterr().out.splitlines()
    assert "the job is running: ranks 0, 1" in runs
    assert stalls.startswith(f"the job is waiting for rank 1 on {socket.gethostname()} since 2")
    second.note("error", text)
    found = judge(read_ranks([path]), None)
    assert (found.cause, found.ranks) == (cause, (1,))
    second.close()
    first.close()
    data = path.read_bytes()
    path.write_bytes(data.replace(b'{"time"', b'{{time"', 1) + b"{}" * 1000)  # torn
    torn, whole = read_ranks([path])
    assert (torn.notes, len(whole.notes)) == ([], 1)
    own, life = b'"pid": %d' % os.getpid(), BLOCK_BYTES + LIFE
    ended = data.replace(own, b'"pid": 0'.ljust(len(own)))
    for no_time in (b"\x7f" * 8, b"\xff" * 8):
        path.write_bytes(ended[:life] + no_time + ended[life + 8 :])
        assert not why.main([str(tmp_path)], standalone_mode=False)


def test_another_process_with_the_number_of_one_that_has_ended(tmp_path: Path) -> None:
    record = flight_record(tmp_path)
    (path,) = record_files(tmp_path)
    assert [rank.runs for rank in read_ranks([path])] == [True]
    (began,) = re.findall(rb'"began": (\d+)', data := path.read_bytes())
    path.write_bytes(data.replace(began, b"1".ljust(len(began))))
    assert [rank.runs for rank in read_ranks([path])] == [False]
    record.close()


def test_more_channels_than_a_flight_record_has_room_for(tmp_path: Path) -> None:
    record = flight_record(tmp_path)
    record.history(range(0, 5000, 2), 0, "many ranks")
    for number in range(200):
        history = record.history(range(2), number, "a label")
    history.submitted(Work(Request("barrier", "it")))
    (rank,) = read_ranks(record_files(tmp_path))
    assert 50 < len(rank.channels) < 200
    assert rank.channels[0] == (0, "many ranks", list(range(0, 5000, 2)))
    assert rank.entries[0].channel == 65535
    record.close()


def test_the_flight_record_of_a_job_that_runs_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for job, pid in ((7, os.getppid()), (8, ended.pid), (9, os.getpid()), (10, os.getpid())):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        flight_record(tmp_path, job=job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flight.7.0", "flight.a.0"]


def test_a_rank_that_joins_leaves_the_flight_record_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it prepares what the others have, in a world of its own."""
    monkeypatch.setenv("HVDTRAIN_FLIGHT_RECORD", str(tmp_path))
    context.init("local")
    (path,) = record_files(tmp_path)
    context.current().newcomer = True
    with context.alone_if_newcomer():
        assert not context.current().newcomer
    assert list(tmp_path.iterdir()) == [path]
    context.shutdown()


def test_no_part_of_a_flight_record_stays_on_a_full_disk(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for rank, blocks in ((0, 0), (0, 1), (1, 1)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES * 3 // 2 if blocks else 1000, -1))
        try:
            if rank == 0 and blocks:
                flight_record(tmp_path)
            else:
                with pytest.raises(OSError, match="no space is left"):
                    flight_record(tmp_path, rank)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.stat().st_size for path in tmp_path.iterdir()] == [BLOCK_BYTES] * blocks


def test_what_there_is_no_room_for_is_counted(tmp_path: Path) -> None:
    records: Records[OperationTimes] = Records(most=2)
    for start in range(5):
        records.append(operation(start, ended=start))
    assert (len(records.kept), records.dropped) == (2, 3)
    path = tmp_path / "it.json"
    events = written(path, times_of(Records()), times_of(records))
    (note,) = [event for event in events if event["ph"] == "i"]
    assert note["pid"] == 1
    assert "3 records dropped" in str(note["name"])
    noted = json.loads(path.read_text())["otherData"]["dropped records"]
    assert noted == {"rank 0": 0, "rank 1": 3}


def test_paths_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "no" / "it.json", tmp_path / "file" / "it.json", "/dev/null"):
        with pytest.raises(TimelineError, match=f"timeline {path} cannot be written"):
            usable_path(str(path))
    gone = str(tmp_path / "gone" / "it.json")
    with pytest.raises(TimelineError, match="No such file"):
        write(gone, [pickle.dumps(times_of(Records()))], ["host"])
    Recording(gone, False, CLOCK, 0.0).write_or_warn(LocalCommunicator(), ["host"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hvdtrain: timeline {gone} cannot be written (No such file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_losses_and_joinings_of_ranks_are_marked(tmp_path: Path) -> None:
    recording = Recording("", False, CLOCK, CLOCK.at_seconds)
    recording.times.note_lost(101.0, 101.5, (1, 2), 4)
    recording.times.note_joined(103.0, 103.25, (2,), 3)
    events = written(tmp_path / "it.json", recording.times.take(), times_of(Records()))
    assert [(e["name"], e["pid"], e["ts"], e["args"]) for e in events if e["ph"] == "i"] == [
        ("ranks 1, 2 of 4 lost", 0, 1e6, {"lost": [1, 2], "ranks before": 4, "seconds": 0.5}),
        ("rank 2 joined", 0, 3e6, {"joined": [2], "ranks": 3, "seconds": 0.25}),
    ]


def events(names: list[str], kind: str = "X") -> list[dict[str, Any]]:
    return [{"name": name, "ph": kind} for name in names]


def names_in(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def test_one_that_grows_too_large_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    first, second = (piece_path(str(path), rank) for rank in (0, 10))
    Path(f"{first}.link").touch()  # of a job that was killed
    file = GrowingFile(first, {}, str(path), most_bytes=200)
    for number in range(7):
        file.write(events([f"{number}" * 60]), [*events(["open"]), *events(["name"], "M")])
        assert path.read_bytes() == Path(first).read_bytes()
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


TITLE = "[rank 1/2]"


def write_piece(path: str) -> None:
    file = GrowingFile(path, {})
    file.write([], [{"name": "old", "ph": "X"}])
    file.close()


@pytest.fixture
def beginning() -> Iterator[Any]:
    recordings = []

    def start(communicator: LocalCommunicator, path: Path) -> None:
        recordings.append(begin(communicator, str(path), False, "host"))

    yield start
    for recording in recordings:
        recording.finish()


def test_whatever_a_write_raises_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, times = GrowingFile(str(tmp_path / "piece"), {}), RankRecords(CLOCK, CLOCK, 0.0)
    piece = PieceWriter(file, times, lambda: times, TITLE, 1, "host")
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
    second = LocalCommunicator()
    second.rank = 1
    beginning(second, path)
    assert {str(each) for each in tmp_path.iterdir()} == {own, other}
    assert '"old"' not in Path(own).read_text()


def test_files_that_others_write_stay(tmp_path: Path, beginning: Any) -> None:
    path = tmp_path / "it.json"
    old, profile = (piece_path(str(path), rank) for rank in (6, 7))
    write_piece(old)
    Path(profile).write_text('{\n  "schemaVersion": 1, "displayTimeUnit": "ms"}')
    beginning(LocalCommunicator(), path)
    assert {str(each) for each in tmp_path.iterdir()} == {
        str(path),
        piece_path(str(path), 0),
        profile,
    }
