"""The timeline that an environment variable asks for."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core.timeline.clock import read_clock
from hvdtrain.core.timeline.file import TimelineError, usable_path
from hvdtrain.core.timeline.recording import Recording
from hvdtrain.engines.communicator import Communicator

__all__ = ["start_from"]


def start_from(config: Config, communicator: Communicator) -> Recording | None:
    """Begin to record if rank 0's environment asks for it (collective; all members are there).

    Rank 0 decides, because a launcher may hand variables to no other rank.

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
    return Recording(path, marks_rounds, read_clock(communicator)) if asked else None
