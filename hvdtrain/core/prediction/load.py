"""How far a computation in the channel's thread slows down that of the program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from hvdtrain.collective import collective

_SECONDS = 0.02
# Elements of a piece of work, which numpy computes without Python's lock in about 100 us.
_PIECE_ELEMENTS = 1 << 14


@collective
def core_share(threads: int, meet: Callable[[], None]) -> float:
    """Return what a computation takes of the cores on which a program computes.

    Both are measured alone and together, on all ranks at the same time:

        c = (1 - program together / program alone) / (other together / other alone)

    It is 0 if there are spare cores, and 1 if the program takes longer by the whole computation.
    """
    other = _speed(0, 1, meet)[1]
    program = _speed(threads, 0, meet)[0]
    slower_program, slower_other = _speed(threads, 1, meet)
    lost = (1 - slower_program / program) / (slower_other / other)
    return min(1.0, max(0.0, lost))


@collective
def _speed(threads: int, others: int, meet: Callable[[], None]) -> tuple[float, float]:
    """Return the speed of threads of the program together, and of the other ones."""
    meet()
    end = time.perf_counter() + _SECONDS
    done = [0.0] * (threads + others)

    def work(number: int) -> None:
        values = np.ones(_PIECE_ELEMENTS)
        began, pieces = time.perf_counter(), 0
        while pieces == 0 or time.perf_counter() < end:  # at least one, however late it begins
            np.sin(values, out=values)
            pieces += 1
        done[number] = pieces / (time.perf_counter() - began)

    workers = [threading.Thread(target=work, args=[number]) for number in range(len(done))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done[:threads]), sum(done[threads:])
