"""One clock for all ranks: each finds out how far its own is ahead of rank 0's.

A barrier ends on no rank before the last rank has entered it. So rank r enters it (at a_r on its
own clock) before rank 0 leaves it (at b_0 on rank 0's), and the other way round. The offset
o_r = clock_r - clock_0 therefore lies in

    a_r - b_0 <= o_r <= b_r - a_0

Over several barriers the narrowest bounds count. The middle between them is taken, or 0 where
they allow it: ranks on one machine share a clock. Between two readings, (t, o) at the start and
(t', o') at the end, clocks are taken to drift evenly:

    clock_0 = clock_r - o - (o' - o) (clock_r - t) / (t' - t)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator

__all__ = ["Reading", "offset", "read_clock", "root_clock"]

_BARRIERS = 10


@dataclass(frozen=True)
class Reading:
    """What was found at one moment.

    Attributes:
        at_seconds: the moment, on this rank's clock (time.perf_counter).
        offset_seconds: how far this rank's clock is ahead of rank 0's.
        error_seconds: how wrong that can be.
    """

    at_seconds: float
    offset_seconds: float
    error_seconds: float


def read_clock(communicator: Communicator) -> Reading:
    """Compare this rank's clock with rank 0's (collective; all members are there)."""
    own = np.empty((_BARRIERS, 2))
    for barrier in own:
        barrier[0] = time.perf_counter()
        communicator.barrier()
        barrier[1] = time.perf_counter()
    root = own.copy()
    communicator.broadcast(Buffer.from_array(root), 0)
    return Reading(time.perf_counter(), *offset(own, root))


def offset(own: npt.NDArray[np.float64], root: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the offset of the own clock and its largest error, from barriers.

    Args:
        own: [n_barriers, 2], when each barrier was entered and left, on the own clock.
        root: the same on rank 0's.
    """
    low = float((own[:, 0] - root[:, 1]).max())
    high = float((own[:, 1] - root[:, 0]).min())
    middle = 0.0 if low <= 0.0 <= high else (low + high) / 2
    return middle, (high - low) / 2


def root_clock(start: Reading, stop: Reading) -> Callable[[float], float]:
    """Return what turns a time of this rank's clock into one of rank 0's."""
    duration = stop.at_seconds - start.at_seconds
    drift = (stop.offset_seconds - start.offset_seconds) / duration if duration > 0 else 0.0
    return lambda seconds: seconds - start.offset_seconds - drift * (seconds - start.at_seconds)
