"""The file of a timeline: whether it can be written, what goes into it, and writing it."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.timeline.clock import read_clock
from hvdtrain.core.timeline.recording import Recording
from hvdtrain.core.timeline.times import RankTimes
from hvdtrain.core.timeline.trace import trace_events
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.types import ReduceOp

__all__ = ["TimelineError", "collect", "usable_path", "write", "write_or_say"]


class TimelineError(UsageError, ValueError):
    """A timeline cannot be recorded, or its file cannot be written."""


def usable_path(file_path: str) -> str:
    """Return the full path of a file that can be written (local).

    Raises:
        TimelineError: it cannot.
    """
    path = os.path.realpath(file_path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise TimelineError(f"timeline {path} cannot be written: it is not a file; name another")
    try:
        with open(_part(path), "w", encoding="utf-8"):
            pass
        os.unlink(_part(path))
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def collect(communicator: Communicator, recording: Recording) -> list[bytes]:
    """Bring what all ranks have recorded to rank 0 (collective; all members are there).

    Returns:
        What `write` takes, on rank 0; on other ranks nothing.
    """
    times = recording.times
    times.stop = read_clock(communicator)
    zero = np.array([times.start.at_seconds - times.start.offset_seconds])
    communicator.allreduce(Buffer.from_array(zero), ReduceOp.MIN)  # Perfetto drops what is earlier
    times.zero_seconds = float(zero[0])
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


def write(path: str, collected: Sequence[bytes], hostnames: Sequence[str]) -> None:
    """Write the file, which is there in whole or not at all (local, rank 0).

    Args:
        path: of the file.
        collected: from `collect`.
        hostnames: of each rank.

    Raises:
        TimelineError: the disk is full, or the directory has gone.
    """
    part = _part(path)
    try:
        try:
            with open(part, "w", encoding="utf-8") as file:
                file.writelines(_text(collected, hostnames))
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_or_say(path: str, collected: Sequence[bytes], hostnames: Sequence[str]) -> None:
    """Write the file, or print why not: a job that has succeeded does not fail for it."""
    try:
        write(path, collected, hostnames)
    except TimelineError as error:
        print(f"hvdtrain: {error}", file=sys.stderr, flush=True)


def _text(collected: Sequence[bytes], hostnames: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of the file, with one rank at a time in memory."""
    clocks: list[dict[str, Any]] = []
    dropped: dict[str, int] = {}
    separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for rank, (data, host) in enumerate(zip(collected, hostnames, strict=True)):
        times: RankTimes = pickle.loads(data)
        for event in trace_events(times, rank, host):
            yield separator + json.dumps(event)
            separator = ",\n"
        clocks.append(_clock(times))
        dropped[f"rank {rank}"] = times.dropped
    notes = {"clocks, in seconds against rank 0": clocks, "dropped records": dropped}
    yield f'\n], "otherData": {json.dumps(notes)}}}\n'


def _clock(times: RankTimes) -> dict[str, float]:
    return {
        "offset at start": times.start.offset_seconds,
        "error at start": times.start.error_seconds,
        "offset at end": times.stop.offset_seconds,
        "error at end": times.stop.error_seconds,
    }


def _part(path: str) -> str:
    return f"{path}.{os.getpid()}.part"


def _cannot_write(path: str, error: OSError) -> TimelineError:
    return TimelineError(
        f"timeline {path} cannot be written ({error.strerror}): name a file in a directory that "
        "is there on rank 0's host and may be written to"
    )
