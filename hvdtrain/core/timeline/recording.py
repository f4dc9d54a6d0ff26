"""Notes what happens on a rank's channels while a timeline is on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdtrain.core.request import Request
from hvdtrain.core.timeline.clock import Reading
from hvdtrain.core.timeline.times import BucketTimes, ChannelTimes, OperationTimes, RankTimes

__all__ = ["Recorded", "Recording", "Track"]

_UNFINISHED = "was under way when the timeline stopped"


class Recorded(Protocol):
    """What an operation tells of itself."""

    request: Request

    @property
    def nbytes(self) -> int:
        """How many bytes this rank contributes."""

    def buckets(self) -> Sequence[BucketTimes]:
        """Return the buckets that have been reduced."""


@dataclass(slots=True)
class _Marks:
    submitted: float
    proposed: float | None = None
    agreed: float | None = None
    began: float | None = None


class Track:
    """Notes what happens on one channel, which calls the methods when it happens.

    Args:
        times: where to keep it.
        marks_rounds: whether to keep when rounds begin.
    """

    def __init__(self, times: ChannelTimes, marks_rounds: bool) -> None:
        self._times = times
        self._marks_rounds = marks_rounds
        self._open: dict[Recorded, _Marks] = {}
        self._round_began = 0.0
        self._agreed: float | None = None

    def submitted(self, operation: Recorded) -> None:
        """Note that this rank's program asks for an operation."""
        self._open[operation] = _Marks(time.perf_counter())

    def proposed(self, operation: Recorded) -> None:
        """Note that a round begins, in which this rank proposes an operation."""
        self._round_began, self._agreed = time.perf_counter(), None
        if self._marks_rounds:
            self._times.rounds.append(self._round_began)
        marks = self._open.get(operation)
        if marks is not None and marks.proposed is None:
            marks.proposed = self._round_began

    def agreed(self) -> None:
        """Note that the ranks know what they run before the next round."""
        self._agreed = time.perf_counter()

    def began(self, operation: Recorded) -> None:
        """Note that an operation enters the engine."""
        now = time.perf_counter()
        agreed = now if self._agreed is None else self._agreed
        # A joined rank has not submitted the operation with which it answers.
        marks = self._open.setdefault(operation, _Marks(agreed))
        if marks.proposed is None:
            marks.proposed = max(marks.submitted, self._round_began)
        marks.agreed, marks.began = max(agreed, marks.proposed), now

    def ended(self, operation: Recorded, error: BaseException | None = None) -> None:
        """Note that an operation is over; one from before the recording is left out."""
        marks = self._open.pop(operation, None)
        if marks is not None:
            self._keep(operation, marks, "" if error is None else str(error))

    def finish(self) -> None:
        """Note which operations are not over."""
        for operation, marks in list(self._open.items()):
            self._keep(operation, marks, _UNFINISHED)
        self._open.clear()

    def _keep(self, operation: Recorded, marks: _Marks, error: str) -> None:
        request = operation.request
        self._times.operations.append(
            OperationTimes(
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
        )
        for bucket in operation.buckets():
            self._times.buckets.append(bucket)


class Recording:
    """What this rank records, for a file that rank 0 will write.

    Args:
        path: of the file; rank 0's counts.
        marks_rounds: whether to keep when rounds of agreement begin.
        start: the clock.
    """

    def __init__(self, path: str, marks_rounds: bool, start: Reading) -> None:
        self.path = path
        self.times = RankTimes(start, start, start.at_seconds)
        self._marks_rounds = marks_rounds
        self._tracks: list[Track] = []

    def track(self, label: str, process_set: str) -> Track:
        """Add the track of a channel, which is named by `label`."""
        times = ChannelTimes(label, process_set)
        self.times.channels.append(times)
        self._tracks.append(Track(times, self._marks_rounds))
        return self._tracks[-1]

    def finish(self) -> None:
        """Note which operations are not over."""
        for track in self._tracks:
            track.finish()
