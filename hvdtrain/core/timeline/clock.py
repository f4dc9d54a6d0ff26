"""Clock synchronization: the offset of each rank's clock from rank 0's.

No rank leaves a barrier before the last rank has entered it. So rank r enters it (at a_r on its
own clock) before rank 0 leaves it (at b_0 on rank 0's clock), and vice versa. The offset
o_r = clock_r - clock_0 is therefore bounded by

    a_r - b_0 <= o_r <= b_r - a_0

The narrowest bounds of several barriers are used. The offset is the middle of the bounds, or 0 if
they include it, because ranks on one machine share a clock. Its error is the distance to the
farther bound; the bounds may cross if the clock drifts between the barriers. Between two readings,
(t, o) at the start and (t', o') at the end, clocks are assumed to drift at a constant rate:

    clock_0 = clock_r - o - (o' - o) (clock_r - t) / (t' - t)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import Communicator

_BARRIERS = 10


@dataclass(frozen=True)
class Reading:
    """A measurement of the offset."""

    at_seconds: float
    offset_seconds: float
    error_seconds: float


@collective
def read_clock(communicator: Communicator) -> Reading:
    """Measure the offset of this rank's clock from rank 0's."""
    own = np.empty((_BARRIERS, 2))
    for barrier in own:
        barrier[0] = time.perf_counter()
        communicator.barrier()
        barrier[1] = time.perf_counter()
    root = own.copy()
    communicator.broadcast(Buffer.from_array(root), 0)
    return Reading(time.perf_counter(), *offset(own, root))


def offset(own: npt.NDArray[np.float64], root: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the offset of a rank's clock and its maximum error.

    Args:
        own: times of entering and leaving each barrier on this rank, float64 [n_barriers, 2].
    """
    low = float((own[:, 0] - root[:, 1]).max())
    high = float((own[:, 1] - root[:, 0]).min())
    middle = 0.0 if low <= 0.0 <= high else (low + high) / 2
    return middle, max(abs(high - middle), abs(low - middle))


def root_clock(start: Reading, stop: Reading) -> Callable[[float], float]:
    """Return a function that converts times of this rank's clock to times of rank 0's."""
    duration = stop.at_seconds - start.at_seconds
    drift = (stop.offset_seconds - start.offset_seconds) / duration if duration > 0 else 0.0
    return lambda seconds: seconds - start.offset_seconds - drift * (seconds - start.at_seconds)
