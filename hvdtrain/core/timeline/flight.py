"""The flight record: a file for each node with what its ranks did last, which outlives them.

Each rank has a block in the file and writes it through mapped memory, so that nothing is lost if it
is killed. A block begins with JSON about the rank. Then come its sign of life, the channels and the
notes in JSON, Python's last lines before a fatal signal, and a ring of operations. `hvdtrain why`
reads it, and converts it for torch's flight recorder.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from itertools import count
from operator import sub
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.exits import is_script, write_message
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
    begin_of,
    has_ended,
)
from hvdtrain.topology import Topology, runs_of

_ENTRIES = (BLOCK_BYTES - RING) // ENTRY_BYTES
# Bytes. A note fits even if JSON doubles them.
_MOST_TEXT, _MOST_PLACE = 1500, 500
_CONTROL = re.compile("[\0-\x1f]+")
_STEP = "optimizer step"
# Of the operations in channels that there is no room for.
_NO_CHANNEL = 65535
# A rank on another host that has written nothing for so long has ended.
_SILENT_SECONDS = 600.0
# What Python's fault handler holds, until a script gives it another file.
_faults: WeakSet[FileIO] = WeakSet()


class FlightRecord:
    """The block of this rank (raises OSError if there is no room for it).

    Args:
        job: number that is the same on all ranks, and greater for later jobs.
    """

    def __init__(self, folder: str, topology: Topology, engine: str, job: int) -> None:
        folder = os.path.abspath(folder)
        os.makedirs(folder, exist_ok=True)
        self._local_rank = topology.local_rank
        self._path = Path(folder, f"flight.{job:x}.{topology.node}")
        host = topology.hostnames[topology.rank]
        if topology.local_rank == 0:
            _remove_before(self._path, host)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        with open(descriptor, "r+b", buffering=0):
            try:
                start = _append_block(descriptor)
            except OSError:
                if not os.fstat(descriptor).st_size:
                    self._path.unlink()
                raise
            self._memory = mmap.mmap(descriptor, BLOCK_BYTES, offset=start)
        about = {
            "flight record": 1,
            "rank": topology.rank,
            "host": host,
            "pid": os.getpid(),
            "began": begin_of(os.getpid()),
            "engine": engine,
            "oom kills": _oom_kills(),
        }
        self._put(0, LIFE, about)
        self._zero = time.time() - time.perf_counter()
        self._places, self._last, self._steps = count(1), 0, 0
        self._channels: list[list[object]] = []
        self._noted, self._stall = NOTES, 0  # the latter is where the last note is, if a stall
        self._has_fault = not faulthandler.is_enabled()
        if self._has_fault:
            fault = FileIO(self._path, "r+")
            fault.seek(start + FAULT)
            faulthandler.enable(fault, all_threads=False)
            _faults.add(fault)
        self.beat()

    def history(self, ranks: Sequence[int], number: int, label: str) -> History:
        """Return the writer of a channel's operations."""
        spans = [[run[0], run[-1]] for run in runs_of(ranks)]
        if len(spans) > 1 and len(steps := set(map(sub, ranks[1:], ranks))) == 1:
            # As of every fourth rank.
            spans = [[ranks[0], ranks[-1], *steps]]
        channels = [*self._channels, [number, label, spans]]
        if not self._put(CHANNELS, NOTES, channels):
            return History(self, _NO_CHANNEL)
        self._channels = channels
        return History(self, len(channels) - 1)

    def beat(self) -> None:
        """Note that this rank is alive."""
        SIGN_OF_LIFE.pack_into(self._memory, LIFE, time.time(), self._steps)

    def note(self, kind: str, text: str) -> None:
        """Note what happens to this rank, and which ranks of the node have ended before."""
        found = {
            "time": time.time(),
            "kind": kind,
            "text": _cut(text, _MOST_TEXT),
            "where": _cut(_where(), _MOST_PLACE),
            "ended": self._ended_ranks(),
            "oom kills": _oom_kills(),
        }
        # A stall is told again and again.
        start = (kind == "stall" and self._stall) or self._noted
        length = self._put(start, FAULT, found)
        if length:
            self._memory[start + length : FAULT] = bytes(FAULT - start - length)
            self._noted, self._stall = start + length, start if kind == "stall" else 0
        self.beat()

    def add(self, operation: Operation, channel: int) -> int:
        """Write an operation to the next place of the ring; return that place."""
        place = self._last = next(self._places)
        request = operation.request
        details = dict(request.details)
        shape = details.get("shape") or details.get("shape beyond the first", "")
        texts = request.operation, request.name, details.get("dtype", "uint8"), shape
        text = "\0".join(texts).encode(errors="replace")[: ENTRY_BYTES - TEXT]
        submitted = self._zero + operation.submitted if operation.submitted else time.time()
        head = ENTRY.pack(place, operation.nbytes, submitted, channel, len(text))
        entry = head + bytes(PROGRESS.size) + text
        start = _start_of(place)
        self._memory[start : start + len(entry)] = entry
        return place

    def update(self, place: int, failed: bool, number: int, began: float, ended: float) -> None:
        """Write how far an operation is, by this process's clock."""
        zero = self._zero
        times = began and zero + began, ended and zero + ended
        PROGRESS.pack_into(self._memory, _start_of(place) + ENTRY.size, failed, number, *times)

    def has_lost(self, place: int) -> bool:
        """Return whether a later operation has been written to a place, which may be 0."""
        return not place or self._last - place >= _ENTRIES

    def count_step(self) -> None:
        self._steps += 1
        self.beat()

    def close(self) -> None:
        """End the record of a rank that leaves in order.

        The file is removed unless an error of a rank of this node is noted in it.
        """
        if self._has_fault:
            _disable_faults()
        if self._local_rank == 0:
            with suppress(OSError):
                if not any(block.failed for block in _blocks(self._path)):
                    self._path.unlink()

    def _put(self, start: int, end: int, value: object) -> int:
        """Write JSON and a line end, if there is room; return the number of bytes."""
        data = json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n"
        if start + len(data) > end:
            return 0
        self._memory[start : start + len(data)] = data
        return len(data)

    def _ended_ranks(self) -> list[int]:
        """Return the ranks of this node whose processes have ended."""
        with suppress(OSError):
            return [block.rank for block in _blocks(self._path) if block.ended]
        return []


class History:
    """Writes the operations of a channel to the flight record."""

    def __init__(self, record: FlightRecord, channel: int) -> None:
        self._record, self._channel, self._ran = record, channel, 0
        self._open: dict[Operation, tuple[int, int, float]] = {}  # place, number, begin

    def submitted(self, operation: Operation) -> None:
        self._open[operation] = self._record.add(operation, self._channel), 0, 0.0

    def began(self, operation: Operation) -> None:
        self._ran += 1
        place = self._open.get(operation, (0, 0, 0.0))[0]
        self._open[operation] = self._write(operation, place, self._ran, time.perf_counter())

    def ended(self, operation: Operation, failed: bool) -> None:
        place, number, began = self._open.pop(operation, (0, 0, 0.0))
        if not number and not failed:  # its vote has run it
            number = self._ran = self._ran + 1
        self._write(operation, place, number, began, time.perf_counter(), failed)
        if operation.request.operation == _STEP and not failed:
            self._record.count_step()

    def _write(
        self,
        operation: Operation,
        place: int,
        number: int,
        began: float,
        ended: float = 0.0,
        failed: bool = False,
    ) -> tuple[int, int, float]:
        if self._record.has_lost(place):
            place = self._record.add(operation, self._channel)
        self._record.update(place, failed, number, began, ended)
        return place, number, began


def _start_of(place: int) -> int:
    return RING + (place - 1) % _ENTRIES * ENTRY_BYTES


class _Block(NamedTuple):
    rank: int
    host: str
    pid: int
    began: int
    life: float
    failed: bool

    @property
    def ended(self) -> bool:
        return has_ended(self.pid, self.began)


def _blocks(path: Path) -> list[_Block]:
    """Return what the blocks of a file say, without earlier ones of the same rank."""
    found = {}
    with open(path, "rb") as file:
        while len(data := file.read(FAULT)) == FAULT:
            with suppress(ValueError, KeyError, TypeError):  # a rank may have just begun it
                about = json.loads(data[:LIFE].partition(b"\n")[0])
                life, _ = SIGN_OF_LIFE.unpack_from(data, LIFE)
                failed = b'"kind": "error"' in data[NOTES:]
                own = about["rank"], about["host"], about["pid"], about.get("began", 0)
                found[about["rank"]] = _Block(*own, life, failed)
            file.seek(BLOCK_BYTES - FAULT, os.SEEK_CUR)
    return list(found.values())


def _append_block(descriptor: int) -> int:
    """Return where the block begins (raises OSError if there is no room for it)."""
    # All of it, since the system ends a process that maps a file and finds the disk full.
    written = os.write(descriptor, bytes(BLOCK_BYTES))
    start = os.lseek(descriptor, 0, os.SEEK_CUR) - written
    if written < BLOCK_BYTES:
        if os.fstat(descriptor).st_size == start + written:  # no other rank has gone on there
            os.ftruncate(descriptor, start)
        raise OSError(errno.ENOSPC, "no space is left")
    return start


def _remove_before(path: Path, host: str) -> None:
    """Remove the files of earlier jobs, but not of jobs that still run."""
    for other in path.parent.glob("flight.*.*"):
        if other.suffixes[:1] == path.suffixes[:1] or not other.is_file():
            continue
        with suppress(OSError):
            blocks, silent = _blocks(other), time.time() - other.stat().st_mtime
            own = any(block.host == host and block.pid == os.getpid() for block in blocks)
            ended = [
                block.ended
                if block.host == host
                else min(silent, time.time() - block.life) > _SILENT_SECONDS
                for block in blocks
            ]
            if own or (blocks and all(ended)):
                other.unlink()


def _disable_faults() -> None:
    """Disable Python's fault handler if it writes to a flight record."""
    for file in list(_faults):
        faulthandler.disable()
        file.close()


# A forked child would write to the block of its parent.
os.register_at_fork(after_in_child=_disable_faults)


def open_flight_record(
    folder: str, topology: Topology, engine: str, job: int
) -> FlightRecord | None:
    """Open the record of this rank (local), or say on one rank of the node why that cannot be."""
    try:
        return FlightRecord(folder, topology, engine, job)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if topology.local_rank == 0:
            write_message(topology.title, f"no flight record in {folder} ({reason})")
        return None


def _cut(text: str, most: int) -> str:
    """Return the beginning of a text in at most so many bytes, which JSON at most doubles."""
    return _CONTROL.sub(" ", text).encode(errors="replace")[:most].decode(errors="ignore")


def _oom_kills() -> int:
    """Return how many processes the kernel of this host has ended for lack of memory."""
    with suppress(OSError):
        found = re.findall(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return sum(map(int, found))
    return 0


def _where() -> str:
    """Return the innermost line of the user's own in the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not is_script(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
