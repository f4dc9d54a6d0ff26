"""The timeline that an environment variable asks for."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core.timeline.begin import begin
from hvdtrain.core.timeline.file import TimelineError, usable_path
from hvdtrain.core.timeline.recording import Recording
from hvdtrain.engines.communicator import Communicator

__all__ = ["start_from"]


def start_from(config: Config, communicator: Communicator, host: str) -> Recording | None:
    """Begin to record if rank 0's environment asks for it (collective; all members are there).

    Rank 0 decides, because a launcher may hand variables to no other rank.

    Args:
        config: the settings of this rank.
        communicator: of all ranks.
        host: where this rank runs.

    Raises:
        TimelineError: rank 0 cannot write the file.
    """
    path, refusal = "", None
    if communicator.rank == 0 and config.timeline != Config.timeline:
        try:
            path = usable_path(config.timeline)
        except TimelineError as error:
            refusal = error
    answers = np.array([path != "", refusal is not None, config.timeline_mark_cycles])
    communicator.broadcast(Buffer.from_array(answers), 0)
    asked, refused, marks_rounds = answers.tolist()
    if refused:
        raise refusal or TimelineError("the timeline cannot be written by rank 0, which says why")
    if not asked:
        return None
    return begin(communicator, _from_root(communicator, path), marks_rounds, host)


def _from_root(communicator: Communicator, text: str) -> str:
    """Return rank 0's text on every rank (collective)."""
    own = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    size = np.array([own.size])
    communicator.broadcast(Buffer.from_array(size), 0)
    content = own.copy() if communicator.rank == 0 else np.empty(int(size[0]), np.uint8)
    communicator.broadcast(Buffer.from_array(content), 0)
    return content.tobytes().decode(errors="surrogateescape")
