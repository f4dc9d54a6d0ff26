"""Start and end of a recording, by all ranks together."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import Stopwatch
from hvdtrain.core.exits import write_message
from hvdtrain.core.timeline.file import (
    GrowingFile,
    PieceWriter,
    TimelineError,
    piece_path,
    remove_piece,
    remove_pieces,
    usable_path,
    write,
)
from hvdtrain.core.timeline.flight import History
from hvdtrain.core.timeline.recorder import Recorder
from hvdtrain.core.timeline.records import (
    ChannelTimes,
    RankRecords,
    Reading,
    Records,
    read_clock,
)
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp


class Recording:
    """The recording of this rank, for a file that rank 0 will write."""

    def __init__(self, path: str, marks_rounds: bool, start: Reading, zero_seconds: float) -> None:
        self.path = path
        self.times = RankRecords(start, start, zero_seconds)
        self.marks_rounds = marks_rounds
        self._recorders: list[Recorder] = []
        self._blocked: Stopwatch | None = None
        self.piece: PieceWriter | None = None

    def follow(self, blocked: Stopwatch) -> None:
        """Record the intervals of a stopwatch until finish()."""
        self._blocked = blocked
        blocked.note = self.times.blocked.append

    def recorder(self, label: str, process_set: str, history: History | None) -> Recorder:
        times = ChannelTimes(label, process_set)
        self.times.channels.append(times)
        self._recorders.append(Recorder(times, self.marks_rounds, history))
        return self._recorders[-1]

    def finish(self) -> None:
        """End the recording, including operations that have not ended."""
        if self._blocked is not None:
            self._blocked.note = None
        for recorder in self._recorders:
            recorder.finish()
        if self.piece is not None:
            self.piece.close()

    def save(self) -> None:
        if self.piece is not None:
            self.piece.save()

    @collective
    def write_or_warn(self, communicator: Communicator, hostnames: Sequence[str]) -> None:
        """Write the file, or print why not: a successful job does not fail for its timeline."""
        try:
            write_timeline(communicator, self, hostnames)
        except TimelineError as error:
            print(f"hvdtrain: {error}", file=sys.stderr, flush=True)

    def under_way(self) -> RankRecords:
        since = self._blocked.since if self._blocked is not None else None
        blocked = Records([(since, time.perf_counter())] if since is not None else ())
        channels = [recorder.under_way() for recorder in list(self._recorders)]
        times = self.times
        return RankRecords(times.start, times.stop, times.zero_seconds, channels, blocked)


@collective
def begin(communicator: Communicator, path: str, marks_rounds: bool, host: str) -> Recording:
    # Before the barriers, after which other ranks create their pieces.
    remove_piece(piece_path(path, communicator.rank))  # hosts may not share the directory
    if communicator.rank == 0:
        remove_pieces(path)
    start = read_clock(communicator)
    zero = np.array([start.at_seconds - start.offset_seconds])
    communicator.allreduce(Buffer.from_array(zero), ReduceOp.MIN)  # Perfetto drops what is earlier
    recording = Recording(path, marks_rounds, start, float(zero[0]))
    title = f"[rank {communicator.rank}/{communicator.size}]"
    # Programs written for Horovod read the file at its path while the job runs.
    also = path if communicator.rank == 0 else None
    file = _open(piece_path(path, communicator.rank), recording, also)
    recording.piece = PieceWriter(
        file, recording.times, recording.under_way, title, communicator.rank, host
    )
    counts = np.array([int(file is None)])
    communicator.allreduce(Buffer.from_array(counts), ReduceOp.SUM)
    if counts[0] and communicator.rank == 0:
        write_message(
            title,
            f"timeline {path}: {counts[0]} of {communicator.size} ranks cannot write beside it on "
            "their hosts: if the job fails, what they record is lost; name a directory that all "
            "hosts share",
        )
    return recording


def _open(path: str, recording: Recording, also: str | None) -> GrowingFile | None:
    start = recording.times.start
    clock = {"offset": start.offset_seconds, "error": start.error_seconds}
    try:
        return GrowingFile(path, {"clock at the start, in seconds against rank 0": clock}, also)
    except OSError:
        return None


@collective
def write_timeline(
    communicator: Communicator, recording: Recording, hostnames: Sequence[str]
) -> None:
    """Write the file of a recording that is finished."""
    collected, refusal = _collect(communicator, recording), None
    if communicator.rank == 0:
        try:
            write(recording.path, collected, hostnames)
        except TimelineError as error:
            refusal = error
    written = np.array([refusal is None])
    communicator.broadcast(Buffer.from_array(written), 0)
    if recording.piece is not None and written[0]:
        recording.piece.remove()
    if refusal is not None:
        raise refusal


@collective
def _collect(communicator: Communicator, recording: Recording) -> list[bytes]:
    """Gather the records of all ranks on rank 0."""
    times = recording.times
    times.stop = read_clock(communicator)
    own = np.frombuffer(pickle.dumps(times, pickle.HIGHEST_PROTOCOL), np.uint8).copy()
    sizes = np.empty(communicator.size, np.int64)
    ones = [1] * communicator.size
    communicator.allgather(Buffer.from_array(np.array([own.size])), Buffer.from_array(sizes), ones)
    incoming = sizes.tolist() if communicator.rank == 0 else [0] * communicator.size
    outgoing = [own.size, *[0] * (communicator.size - 1)]
    every = np.empty(sum(incoming), np.uint8)
    communicator.alltoall(Buffer.from_array(own), Buffer.from_array(every), outgoing, incoming)
    parts = np.split(every, np.cumsum(incoming)[:-1])
    return [part.tobytes() for part in parts] if communicator.rank == 0 else []


@collective
def begin_from_environment(
    config: Config, communicator: Communicator, host: str
) -> Recording | None:
    """Start a recording that rank 0's environment asks for; others may lack its variables."""
    path, refusal = "", None
    if communicator.rank == 0:
        try:
            path = usable_path(config.timeline)
        except TimelineError as error:
            refusal = error
    own = path, refusal is not None, config.timeline_mark_cycles
    path, refused, marks_rounds = communicator.gather_objects(own)[0]
    if refused:
        raise refusal or TimelineError("the timeline cannot be written by rank 0, which says why")
    return begin(communicator, path, marks_rounds, host) if path else None
