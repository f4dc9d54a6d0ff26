"""Writing of a rank's records while the job runs, so that they survive if it is killed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from hvdtrain.core.process.exits import write_message
from hvdtrain.core.timeline.events import Event, Events
from hvdtrain.core.timeline.growing_file import GrowingFile
from hvdtrain.core.timeline.items import TraceRow, rows_of
from hvdtrain.core.timeline.pieces import remove_piece
from hvdtrain.core.timeline.times import RankRecords

_PAUSE_SECONDS = 0.5
# An abort does not wait longer for a disk that does not respond.
_LOCK_TIMEOUT_SECONDS = 1.0


class PieceWriter:
    """A thread that writes the records of a rank, from its creation to close()."""

    def __init__(
        self,
        file: GrowingFile | None,
        times: RankRecords,
        under_way: Callable[[], RankRecords],
        title: str,
        rank: int,
        host: str,
    ) -> None:
        self._file, self._title = file, title
        self._path = file.path if file is not None else None
        self._times, self._under_way = times, under_way
        self._piece_events = _PieceEvents(times, rank, host)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvdtrain-timeline", daemon=True)
        self.save()
        self._thread.start()

    def save(self) -> None:
        """Write all records so far."""
        if self._lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
            try:
                self._write()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Write all records and stop the thread."""
        self._closing.set()
        self._thread.join()
        self.save()
        self._release()

    def remove(self) -> None:
        """Remove the file after close(), because its contents are in another file."""
        if self._path is not None:
            remove_piece(self._path)

    def _serve(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self.save()

    def _write(self) -> None:
        fresh = self._times.take()
        if self._file is None:
            return
        try:
            lasting = list(self._piece_events.add(fresh))
            passing = self._piece_events.passing(self._under_way())
            self._file.write(lasting, passing)
        except Exception as error:  # no error of the timeline ends the job
            reason = error.strerror if isinstance(error, OSError) else None
            write_message(self._title, f"timeline: {self._path} ends here: {reason or repr(error)}")
            self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a failed write has been reported already
                file.close()


class _PieceEvents:
    """A converter of batches of records to events, which assigns them to rows."""

    def __init__(self, times: RankRecords, rank: int, host: str) -> None:
        self._events = Events(times, rank)
        self._host = host
        self._ends: dict[str, list[float]] = {}  # of each lane of the rows with a label
        self._threads: dict[tuple[str, int], int] = {}

    def add(self, times: RankRecords) -> Iterator[Event]:
        """Yield the events of final records."""
        for row in rows_of(times):
            ends = self._ends.setdefault(row.label, [])
            yield from self._row(row, ends)
        yield from self._events.changes(times)

    def passing(self, times: RankRecords) -> Iterator[Event]:
        """Yield the events of records that later ones replace, and the metadata of all rows."""
        for row in rows_of(times):
            yield from self._row(row, list(self._ends.get(row.label, [])))
        yield from self._events.process(self._host)
        for (label, lane), thread in self._threads.items():
            yield from self._events.thread(thread, label, lane)

    def _row(self, row: TraceRow, ends: list[float]) -> Iterator[Event]:
        for item in sorted(row.items, key=lambda item: item.start):
            lane = next((n for n, end in enumerate(ends) if end <= item.start), len(ends))
            ends[lane : lane + 1] = [item.end]
            yield from self._events.slices(item, self._thread(row.label, lane + 1))
        for moment in row.marks:
            yield self._events.round(moment, self._thread(row.label, 1))

    def _thread(self, label: str, lane: int) -> int:
        return self._threads.setdefault((label, lane), len(self._threads) + 1)
