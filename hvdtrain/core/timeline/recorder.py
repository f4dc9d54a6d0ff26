"""The recorder of a channel: what this rank did in it, for the timeline and the flight record."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.timeline.flight import History
from hvdtrain.core.timeline.records import ChannelTimes, OperationTimes, Records

_UNFINISHED = "was under way when the timeline stopped"
_UNDER_WAY = "was under way when this was written"


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
        if self.history is not None:
            self.history.submitted(operation)

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
        if self.history is not None:
            self.history.began(operation)

    def ended(self, operation: Operation, error: BaseException | None = None) -> None:
        """Record that an operation has ended, in a timeline unless it began before that."""
        marks = self._open.pop(operation, None)
        if self.history is not None:
            self.history.ended(operation, failed=error is not None)
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
