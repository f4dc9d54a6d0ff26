"""A ledger of the samples of each step, to check that each is used once when ranks are killed."""

from __future__ import annotations

import json
import os

from hvdtrain.core import context
from hvdtrain.data.sampling.sharding import Indices
from hvdtrain.milestones import RESTARTS

# Name of a file; that of each process ends with its number.
_VARIABLE = "HVDTRAIN_LEDGER"


def note_samples(epoch: int, done: int, own: Indices) -> None:
    """Append a line about the next step, if HVDTRAIN_LEDGER asks for it.

    A step counts if ranks continue from a later point: lines are written before it, as a rank
    that is killed after it has no time to.

    Args:
        own: numbers of the samples of this rank, int64 [n].
    """
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    size = context.current().topology.size
    start = int(os.environ.get(RESTARTS, "0"))
    line = {"epoch": epoch, "done": done, "start": start, "ranks": size, "samples": own.tolist()}
    with open(f"{path}.{os.getpid()}", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
