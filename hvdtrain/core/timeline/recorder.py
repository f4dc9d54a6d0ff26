"""The recorder of a channel: what this rank did in it, for the timeline and the flight record.

The flight record is a file of each rank about its last operations, for a job that hangs or dies. It
has the structure of torch's flight recorder, in JSON instead of pickle: once it reads that,
`torch.distributed.flight_recorder` compares the files of all ranks.
"""

from __future__ import annotations

import ast
import json
import os
import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation, Request
from hvdtrain.core.exits import write_message
from hvdtrain.core.timeline.records import ChannelTimes, OperationTimes, Records
from hvdtrain.files import replacing
from hvdtrain.topology import Topology

_UNFINISHED = "was under way when the timeline stopped"
_UNDER_WAY = "was under way when this was written"
# So many operations of a channel are in a flight record, or nearly twice as many.
_MOST = 1000


class Entry(NamedTuple):
    """An operation in a flight record; `number` is its place among those that ran, else 0."""

    number: int
    request: Request
    nbytes: int
    submitted: float
    began: float | None = None
    ended: float | None = None


class History:
    """The last operations of a channel that have ended."""

    def __init__(self) -> None:
        self._ran = 0
        self._kept: deque[Entry] = deque(maxlen=2 * _MOST)

    def add(self, operation: Operation, began: float | None, failed: bool) -> None:
        number = 0
        if began is not None or not failed:
            number = self._ran = self._ran + 1
        ended = None if failed else time.perf_counter()
        request, nbytes, submitted = operation.request, operation.nbytes, operation.submitted
        self._kept.append(Entry(number, request, nbytes, submitted, began, ended))

    def entries(self, pending: Sequence[tuple[Operation, float | None]]) -> list[Entry]:
        """Return what has ended, and what is pending, with the time at which that began."""
        # Ranks may differ in the last operations, but should begin with the same one: torch's
        # analyzer aligns the beginnings of a single channel only.
        least = (self._ran // _MOST - 1) * _MOST
        found = [entry for entry in self._kept.copy() if not entry.number or entry.number > least]
        running = self._ran
        for operation, began in pending:
            running += began is not None
            number = running if began is not None else 0
            request, nbytes = operation.request, operation.nbytes
            found.append(Entry(number, request, nbytes, operation.submitted, began))
        return found


@dataclass(slots=True)
class _Marks:
    submitted: float
    proposed: float | None = None
    agreed: float | None = None
    began: float | None = None


class Recorder:
    """The observer of one channel: for a timeline, a flight record, or both."""

    def __init__(
        self, times: ChannelTimes | None, marks_rounds: bool, history: History | None
    ) -> None:
        self._times, self.history = times, history
        self._marks_rounds = marks_rounds
        self._open: dict[Operation, _Marks] = {}
        self._round_began = 0.0
        self._agreed: float | None = None

    def submitted(self, operation: Operation) -> None:
        self._open[operation] = _Marks(time.perf_counter())

    def proposed(self, operation: Operation) -> None:
        self._round_began, self._agreed = time.perf_counter(), None
        if self._marks_rounds and self._times is not None:
            self._times.rounds.append(self._round_began)
        marks = self._open.get(operation)
        if marks is not None and marks.proposed is None:
            marks.proposed = self._round_began

    def agreed(self) -> None:
        self._agreed = time.perf_counter()

    def began(self, operation: Operation) -> None:
        now = time.perf_counter()
        agreed = now if self._agreed is None else self._agreed
        # A joined rank has not submitted the operation with which it answers.
        marks = self._open.setdefault(operation, _Marks(agreed))
        if marks.proposed is None:
            marks.proposed = max(marks.submitted, self._round_began)
        marks.agreed, marks.began = max(agreed, marks.proposed), now

    def ended(self, operation: Operation, error: BaseException | None = None) -> None:
        """Record that an operation has ended, in a timeline unless it began before that."""
        marks = self._open.pop(operation, None)
        if self.history is not None:
            began = None if marks is None else marks.began
            self.history.add(operation, began, failed=error is not None)
        if marks is not None and self._times is not None:
            self._keep(self._times, operation, marks, "" if error is None else str(error))

    def finish(self) -> None:
        """Record the operations that have not ended."""
        if self._times is not None:
            for operation, marks in list(self._open.items()):
                self._keep(self._times, operation, marks, _UNFINISHED)
        self._open.clear()

    def under_way(self) -> ChannelTimes:
        """Return records of the operations that have not ended, as if they ended now."""
        under_way, times = list(self._open.items()), self._times
        assert times is not None
        return ChannelTimes(
            times.label,
            times.process_set,
            Records(_times_of(operation, marks, _UNDER_WAY) for operation, marks in under_way),
            Records(bucket for operation, _ in under_way for bucket in operation.buckets()),
        )

    def entries(self, pending: Sequence[Operation]) -> list[Entry]:
        """Return what a flight record has of this channel."""
        if self.history is None:
            return []
        marks = [self._open.get(operation) for operation in pending]
        began = [None if each is None else each.began for each in marks]
        return self.history.entries(list(zip(pending, began, strict=True)))

    @staticmethod
    def _keep(times: ChannelTimes, operation: Operation, marks: _Marks, error: str) -> None:
        times.operations.append(_times_of(operation, marks, error))
        for bucket in operation.buckets():
            times.buckets.append(bucket)


def _times_of(operation: Operation, marks: _Marks, error: str) -> OperationTimes:
    request = operation.request
    return OperationTimes(
        request.operation,
        request.name,
        dict(request.details).get("op", ""),
        operation.nbytes,
        marks.submitted,
        marks.proposed,
        marks.agreed,
        marks.began,
        time.perf_counter(),
        error,
    )


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


class FlightRecord:
    """The file of this rank."""

    def __init__(self, folder: str, topology: Topology, engine: str) -> None:
        self._path = Path(folder).absolute() / f"flight_rank_{topology.rank}"
        # The analyzer knows some backends of torch only.
        self._title, self._backend = topology.title, "nccl" if engine == "nccl" else "gloo"

    def recorder(self, history: History | None) -> Recorder:
        """Return a recorder of a channel for this file alone, which continues a history."""
        return Recorder(None, False, history or History())

    def clear(self) -> None:
        """Remove the files of an earlier job."""
        for path in self._path.parent.glob("flight_rank_*"):
            with suppress(OSError):
                path.unlink()

    def write(self, recorders: Sequence[tuple[Channel, Recorder]]) -> None:
        """Write what all channels have done, and what is pending in them (in any thread)."""
        groups: dict[str, dict[str, str]] = {}
        entries: list[dict[str, Any]] = []
        for channel, recorder in recorders:
            ranks = str(list(channel.ranks))
            uid = f"{zlib.crc32(ranks.encode()):08x}.{channel.number}"
            groups[uid] = {"name": uid, "desc": channel.label, "ranks": ranks}
            # The last one under each number: one that has failed may be submitted again.
            own = {
                entry["record_id"]: entry
                for each in recorder.entries(channel.queue.operations())
                for entry in [self._entry(each, [uid, channel.label])]
            }
            entries += own.values()
        entries.sort(key=lambda entry: entry["record_id"])
        content = {"version": _VERSION, "pg_config": groups, "entries": entries}
        try:
            os.makedirs(self._path.parent, exist_ok=True)
            with replacing(self._path) as file:
                file.write(json.dumps(content).encode())
        except OSError as error:
            text = f"flight record {self._path} cannot be written ({error.strerror or error})"
            write_message(self._title, text)

    def _entry(self, entry: Entry, group: list[str]) -> dict[str, Any]:
        request = entry.request
        details = dict(request.details)
        shapes = details.get("shape") or details.get("shape beyond the first")
        sizes = ast.literal_eval(f"[{shapes}]") if shapes else [[entry.nbytes]]
        types = details.get("dtype", "uint8").split(", ")
        number = entry.number or _FIRST_PENDING + zlib.crc32(request.key.encode())
        kind = _KINDS.get(request.operation, "barrier")
        states = "scheduled", "started", "completed"
        zero = time.time_ns() - time.perf_counter_ns()
        created, began, ended = (
            None if seconds is None else zero + round(seconds * 1e9)
            for seconds in (entry.submitted, entry.began, entry.ended)
        )
        return {
            "record_id": number,
            "pg_id": 0,
            "process_group": group,
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "is_p2p": False,
            "profiling_name": f"{self._backend}:{kind} {request.subject.replace(':', '.')}",
            "input_sizes": sizes,
            "output_sizes": sizes,
            "input_dtypes": types,
            "output_dtypes": types,
            "state": states[2 if ended else 1 if began else 0],
            "time_created_ns": created,
            "time_discovered_started_ns": began,
            "time_discovered_completed_ns": ended,
            "retired": ended is not None,
            "frames": [],
        }
