"""The end of a recording, on all ranks together: what they have recorded goes into one file."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.timeline.clock import read_clock
from hvdtrain.core.timeline.file import TimelineError, write
from hvdtrain.core.timeline.recording import Recording
from hvdtrain.engines.communicator import Communicator

__all__ = ["conclude", "conclude_or_say"]


def conclude(communicator: Communicator, recording: Recording, hostnames: Sequence[str]) -> None:
    """Write the file of a recording that is finished (collective; all members are there).

    Args:
        communicator: of all ranks.
        recording: of this rank.
        hostnames: of each rank.

    Raises:
        TimelineError: it cannot be written (on rank 0); what ranks have written as they went stays.
    """
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


def conclude_or_say(
    communicator: Communicator, recording: Recording, hostnames: Sequence[str]
) -> None:
    """Do the same, but print why not: a job that has succeeded does not fail for it."""
    try:
        conclude(communicator, recording, hostnames)
    except TimelineError as error:
        print(f"hvdtrain: {error}", file=sys.stderr, flush=True)


def _collect(communicator: Communicator, recording: Recording) -> list[bytes]:
    """Bring what all ranks have recorded to rank 0 (collective; all members are there).

    Returns:
        What `write` takes, on rank 0; on other ranks nothing.
    """
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
