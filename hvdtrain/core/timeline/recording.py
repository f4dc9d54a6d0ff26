"""Recording of a rank's channels for a timeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdtrain.core.agreement.operation import BucketTimes
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.timeline.clock import Reading
from hvdtrain.core.timeline.piece import PieceWriter
from hvdtrain.core.timeline.stopwatch import Stopwatch
from hvdtrain.core.timeline.times import (
    ChannelTimes,
    JoinTimes,
    OperationTimes,
    RankRecords,
    Records,
    RecoveryTimes,
)

_UNFINISHED = "was under way when the timeline stopped"
_UNDER_WAY = "was under way when this was written"


class Recorded(Protocol):
    """The part of an operation that is recorded."""

    request: Request

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank contributes."""

    def buckets(self) -> Sequence[BucketTimes]:
        """Return the buckets that have been reduced."""


@dataclass(slots=True)
class _Marks:
    submitted: float
    proposed: float | None = None
    agreed: float | None = None
    began: float | None = None


class Track:
    """The recording of one channel, which is its observer."""

    def __init__(self, times: ChannelTimes, marks_rounds: bool) -> None:
        self._times = times
        self._marks_rounds = marks_rounds
        self._open: dict[Recorded, _Marks] = {}
        self._round_began = 0.0
        self._agreed: float | None = None

    def submitted(self, operation: Recorded) -> None:
        """Record that this rank has submitted an operation."""
        self._open[operation] = _Marks(time.perf_counter())

    def proposed(self, operation: Recorded) -> None:
        """Record that a round begins in which this rank proposes an operation."""
        self._round_began, self._agreed = time.perf_counter(), None
        if self._marks_rounds:
            self._times.rounds.append(self._round_began)
        marks = self._open.get(operation)
        if marks is not None and marks.proposed is None:
            marks.proposed = self._round_began

    def agreed(self) -> None:
        """Record that all ranks have agreed on the operations of a round."""
        self._agreed = time.perf_counter()

    def began(self, operation: Recorded) -> None:
        """Record that an operation starts to run."""
        now = time.perf_counter()
        agreed = now if self._agreed is None else self._agreed
        # A joined rank has not submitted the operation with which it answers.
        marks = self._open.setdefault(operation, _Marks(agreed))
        if marks.proposed is None:
            marks.proposed = max(marks.submitted, self._round_began)
        marks.agreed, marks.began = max(agreed, marks.proposed), now

    def ended(self, operation: Recorded, error: BaseException | None = None) -> None:
        """Record that an operation has ended, unless it began before the recording."""
        marks = self._open.pop(operation, None)
        if marks is not None:
            self._keep(operation, marks, "" if error is None else str(error))

    def finish(self) -> None:
        """Record the operations that have not ended."""
        for operation, marks in list(self._open.items()):
            self._keep(operation, marks, _UNFINISHED)
        self._open.clear()

    def under_way(self) -> ChannelTimes:
        """Return records of the operations that have not ended, as if they ended now."""
        under_way = list(self._open.items())
        return ChannelTimes(
            self._times.label,
            self._times.process_set,
            Records(_times_of(operation, marks, _UNDER_WAY) for operation, marks in under_way),
            Records(bucket for operation, _ in under_way for bucket in operation.buckets()),
        )

    def _keep(self, operation: Recorded, marks: _Marks, error: str) -> None:
        self._times.operations.append(_times_of(operation, marks, error))
        for bucket in operation.buckets():
            self._times.buckets.append(bucket)


def _times_of(operation: Recorded, marks: _Marks, error: str) -> OperationTimes:
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


class Recording:
    """The recording of this rank, for a file that rank 0 will write."""

    def __init__(self, path: str, marks_rounds: bool, start: Reading, zero_seconds: float) -> None:
        self.path = path
        self.times = RankRecords(start, start, zero_seconds)
        self.marks_rounds = marks_rounds
        self._tracks: list[Track] = []
        self._blocked: Stopwatch | None = None
        self.piece: PieceWriter | None = None

    def follow(self, blocked: Stopwatch) -> None:
        """Record the intervals of a stopwatch until finish()."""
        self._blocked = blocked
        blocked.intervals = self.times.blocked

    def track(self, label: str, process_set: str) -> Track:
        """Add and return the recording of a channel."""
        times = ChannelTimes(label, process_set)
        self.times.channels.append(times)
        self._tracks.append(Track(times, self.marks_rounds))
        return self._tracks[-1]

    def recovered(self, times: RecoveryTimes) -> None:
        """Record a recovery from the loss of ranks."""
        self.times.recoveries.append(times)

    def joined(self, times: JoinTimes) -> None:
        """Record that ranks have joined."""
        self.times.joins.append(times)

    def finish(self) -> None:
        """End the recording, including operations that have not ended."""
        if self._blocked is not None:
            self._blocked.intervals = None
        for track in self._tracks:
            track.finish()
        if self.piece is not None:
            self.piece.close()

    def save(self) -> None:
        """Write all records so far to disk."""
        if self.piece is not None:
            self.piece.save()

    def under_way(self) -> RankRecords:
        """Return records of what has not ended, as if it ended now."""
        since = self._blocked.since if self._blocked is not None else None
        blocked = Records([(since, time.perf_counter())] if since is not None else ())
        channels = [track.under_way() for track in list(self._tracks)]
        times = self.times
        return RankRecords(times.start, times.stop, times.zero_seconds, channels, blocked)
