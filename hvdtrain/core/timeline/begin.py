"""The beginning of a recording, on all ranks together."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.process.exits import say
from hvdtrain.core.timeline.clock import read_clock
from hvdtrain.core.timeline.growing_file import GrowingFile
from hvdtrain.core.timeline.piece import Piece
from hvdtrain.core.timeline.pieces import piece_path, remove_piece, remove_pieces
from hvdtrain.core.timeline.recording import Recording
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp

__all__ = ["begin"]


def begin(communicator: Communicator, path: str, marks_rounds: bool, host: str) -> Recording:
    """Begin to record (collective; all members are there).

    Args:
        communicator: of all ranks.
        path: of the file that rank 0 will write, the same on all ranks.
        marks_rounds: whether to mark when rounds of agreement begin.
        host: where this rank runs.
    """
    # Before the barriers, after which others make theirs.
    remove_piece(piece_path(path, communicator.rank))  # hosts may not share the directory
    if communicator.rank == 0:
        remove_pieces(path)
    start = read_clock(communicator)
    zero = np.array([start.at_seconds - start.offset_seconds])
    communicator.allreduce(Buffer.from_array(zero), ReduceOp.MIN)  # Perfetto drops what is earlier
    recording = Recording(path, marks_rounds, start, float(zero[0]))
    title = f"[rank {communicator.rank}/{communicator.size}]"
    file = _open(piece_path(path, communicator.rank), recording)
    recording.piece = Piece(
        file, recording.times, recording.under_way, title, communicator.rank, host
    )
    _warn_of_missing(communicator, file is None, title, path)
    return recording


def _open(path: str, recording: Recording) -> GrowingFile | None:
    start = recording.times.start
    clock = {"offset": start.offset_seconds, "error": start.error_seconds}
    try:
        return GrowingFile(path, {"clock at the start, in seconds against rank 0": clock})
    except OSError:
        return None


def _warn_of_missing(communicator: Communicator, missing: bool, title: str, path: str) -> None:
    counts = np.array([int(missing)])
    communicator.allreduce(Buffer.from_array(counts), ReduceOp.SUM)
    if counts[0] and communicator.rank == 0:
        say(
            title,
            f"timeline {path}: {counts[0]} of {communicator.size} ranks cannot write beside it on "
            "their hosts: if the job fails, what they record is lost; name a directory that all "
            "hosts share",
        )
