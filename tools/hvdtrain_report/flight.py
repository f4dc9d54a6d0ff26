"""Reader of flight records: what the ranks of each node left when their job died."""

from __future__ import annotations

import ast
import json
import re
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.flight_layout import (
    BLOCK_BYTES,
    CHANNELS,
    ENTRY,
    ENTRY_BYTES,
    FAULT,
    LIFE,
    NOTES,
    PROGRESS,
    RING,
    SIGN_OF_LIFE,
    TEXT,
    has_ended,
)
from hvdtrain_report.lines import JsonObject

_LEAVE = "leave the job"
_NAME = re.compile(r"flight\.([0-9a-f]+)\.\d+")
# A rank on another host that has not written for so long has ended if another has, or may still
# run: it may keep no stall watch, and network file systems show late what it writes.
_SILENT_SECONDS, _LATE_SECONDS = 10.0, 90.0
_LATEST = float(1 << 33)  # in the year 2242


@dataclass(frozen=True)
class Entry:
    """An operation; times are seconds since the epoch, or 0."""

    nbytes: int
    submitted: float
    channel: int
    failed: bool
    number: int  # among the operations of the channel that ran, or 0
    began: float
    ended: float
    operation: str
    name: str
    dtype: str
    shape: str

    @property
    def subject(self) -> str:
        named = self.name and not self.name.startswith("noname.")
        return f"{self.operation} {self.name!r}" if named else self.operation


@dataclass(frozen=True)
class Note:
    time: float
    kind: str
    text: str
    where: str
    ended: tuple[int, ...]  # ranks of the node whose processes had ended
    oom_kills: int


@dataclass(frozen=True)
class Rank:
    """What one rank left."""

    rank: int
    host: str
    pid: int
    began: int  # of the process, or 0
    engine: str
    oom_kills: int
    life: float
    steps: int
    channels: list[tuple[int, str, list[int]]]  # number, label and ranks
    notes: list[Note]
    fault: str
    entries: list[Entry]  # in the order of their submission

    @property
    def last_sign(self) -> float:
        times = (max(e.submitted, e.began, 0.0 if e.failed else e.ended) for e in self.entries)
        return max([self.life, *times])

    @property
    def done(self) -> Entry | None:
        """The last operation that has ended, before the rank left."""
        whole = [e for e in self.entries if e.ended and not e.failed and e.operation != _LEAVE]
        return max(whole, key=lambda e: e.ended, default=None)

    @property
    def pending(self) -> Entry | None:
        """The first operation that has not ended well."""
        return next((e for e in self.entries if not e.ended or e.failed), None)

    @property
    def runs(self) -> bool:
        if self.host != socket.gethostname():
            return time.time() - self.life < _SILENT_SECONDS
        return not has_ended(self.pid, self.began)

    @property
    def may_run(self) -> bool:
        """Whether it runs, or is on another host and has not noted that it ends."""
        if self.runs or self.host == socket.gethostname():
            return self.runs
        ends = any(note.kind != "stall" for note in self.notes)
        return not ends and time.time() - self.life < _LATE_SECONDS


def record_files(folder: Path) -> list[Path]:
    """Return the files of the last job in a folder."""
    found = [(m[1], p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)) and p.is_file()]
    last = max((int(job, 16) for job, _ in found), default=0)
    return sorted(path for job, path in found if int(job, 16) == last)


def read_ranks(files: Sequence[Path]) -> list[Rank]:
    ranks: dict[int, Rank] = {}
    for path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        for start in range(0, len(data), BLOCK_BYTES):
            # A rank may have been killed while it wrote it.
            with suppress(ValueError, KeyError, TypeError, struct.error):
                rank = _rank(data[start : start + BLOCK_BYTES])
                ranks[rank.rank] = rank
    return [ranks[rank] for rank in sorted(ranks)]


def _rank(block: bytes) -> Rank:
    (about,), channels = _objects(block[:LIFE]), _objects(block[CHANNELS:NOTES])
    notes = []
    for n in _objects(block[NOTES:FAULT]):
        with suppress(KeyError, TypeError):
            ended = tuple(n["ended"])
            notes.append(Note(n["time"], n["kind"], n["text"], n["where"], ended, n["oom kills"]))
    life, steps = SIGN_OF_LIFE.unpack_from(block, LIFE)
    if not _are_times(life, *(note.time for note in notes)):
        raise ValueError("these are no times")
    return Rank(
        about["rank"],
        about["host"],
        about["pid"],
        about.get("began", 0),
        about["engine"],
        about["oom kills"],
        life,
        steps,
        [(n, label, _unspanned(spans)) for each in channels[:1] for n, label, spans in each],
        notes,
        block[FAULT:RING].rstrip(b"\0").decode(errors="replace"),
        [entry for _, entry in sorted(_entries(block), key=lambda pair: pair[0])],
    )


def _objects(data: bytes) -> list[Any]:
    lines = data.partition(b"\0")[0].split(b"\n")[:-1]  # without one that a kill has torn
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _unspanned(spans: Sequence[Sequence[int]]) -> list[int]:
    return [rank for first, last, *step in spans for rank in range(first, last + 1, *step)]


def _are_times(*found: float) -> bool:
    return all(0 <= at < _LATEST for at in found)


def _entries(block: bytes) -> Iterator[tuple[int, Entry]]:
    for start in range(RING, len(block) - ENTRY_BYTES + 1, ENTRY_BYTES):
        place, nbytes, submitted, channel, length = ENTRY.unpack_from(block, start)
        failed, *progress = PROGRESS.unpack_from(block, start + ENTRY.size)
        text = block[start + TEXT : start + min(TEXT + length, ENTRY_BYTES)]
        texts = text.decode(errors="replace").split("\0")
        if place > 0 and _are_times(submitted, *progress[1:]):
            texts += [""] * (4 - len(texts))
            head = nbytes, submitted, channel, bool(failed)
            yield place, Entry(*head, *progress, *texts[:4])


_VERSION = "2.10"  # of the files that torch 2.13 writes
# What has not run on all ranks has no place in their common order, and is known by its name.
_FIRST_PENDING = 1 << 32
_KINDS = {
    "allreduce": "all_reduce",
    "optimizer step": "all_reduce",
    "allgather": "all_gather_v",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter_v",
}


def write_for_torch(ranks: Sequence[Rank], folder: Path) -> None:
    """Write flight_rank_N of each rank, as torch's flight recorder does but for JSON."""
    # The analyzer aligns the beginnings of a single channel only.
    firsts: dict[tuple[str, int], int] = {}
    for rank in ranks:
        for index, (number, label, _) in enumerate(rank.channels):
            own = [e.number for e in rank.entries if e.number and e.channel == index]
            firsts[label, number] = max(firsts.get((label, number), 0), min(own, default=0))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            text = json.dumps(_for_torch(rank, firsts))
            (folder / f"flight_rank_{rank.rank}").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from error


def _for_torch(rank: Rank, firsts: dict[tuple[str, int], int]) -> JsonObject:
    groups, entries = {}, {}
    for index, (number, label, members) in enumerate(rank.channels):
        uid = f"{zlib.crc32(str(members).encode()):08x}.{number}"
        groups[uid] = {"name": uid, "desc": label, "ranks": str(members)}
        for each in rank.entries:
            if each.channel == index and (not each.number or each.number >= firsts[label, number]):
                entry = _torch_entry(each, [uid, label], rank.engine)
                entries[uid, entry["record_id"]] = entry
    kept = sorted(entries.values(), key=lambda entry: entry["record_id"])
    return {"version": _VERSION, "pg_config": groups, "entries": kept}


def _torch_entry(entry: Entry, group: list[str], engine: str) -> JsonObject:
    try:
        sizes = ast.literal_eval(f"[{entry.shape}]") or [[entry.nbytes]]
    except (ValueError, SyntaxError):  # a long text is cut
        sizes = [[entry.nbytes]]
    types, ended = entry.dtype.split(", "), entry.ended and not entry.failed
    number = entry.number or _FIRST_PENDING + zlib.crc32(f"{entry.operation}.{entry.name}".encode())
    # The analyzer knows some backends of torch only.
    backend = "nccl" if engine == "nccl" else "gloo"
    kind = _KINDS.get(entry.operation, "barrier")
    created, began, done = (
        round(at * 1e9) if at else None for at in (entry.submitted, entry.began, ended)
    )
    return {
        **dict.fromkeys(("record_id", "collective_seq_id", "op_id"), number),
        "process_group": group,
        **dict.fromkeys(("pg_id", "p2p_seq_id"), 0),
        "is_p2p": False,
        "profiling_name": f"{backend}:{kind} {entry.subject.replace(':', '.')}",
        **dict.fromkeys(("input_sizes", "output_sizes"), sizes),
        **dict.fromkeys(("input_dtypes", "output_dtypes"), types),
        "state": "completed" if ended else "started" if began else "scheduled",
        "time_created_ns": created,
        "time_discovered_started_ns": began,
        "time_discovered_completed_ns": done,
        "retired": bool(ended),
        "frames": [],
    }
