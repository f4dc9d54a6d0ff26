"""A memory pool that several threads allocate from."""

from __future__ import annotations

import sys
import threading

import numpy as np

from hvdtrain.core.arrays.memory import MemoryPool, empty

TRIES, THREADS = 5000, 4
HANGS_AFTER_SECONDS = 300


def test_a_block_is_lent_to_one_thread_at_a_time() -> None:
    memory = MemoryPool(empty([8], np.uint8))
    together = threading.Barrier(THREADS)
    overwritten = [0] * THREADS

    def borrow(number: int) -> None:
        for _ in range(TRIES):
            together.wait(HANGS_AFTER_SECONDS)
            block = memory.allocate()
            block[:] = number
            together.wait(HANGS_AFTER_SECONDS)  # all have one
            overwritten[number] += int((block != number).any())
            del block

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=borrow, args=[number]) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert overwritten == [0] * THREADS


def test_what_is_given_back_is_lent_again() -> None:
    first = empty([8], np.uint8)
    memory = MemoryPool(first)
    lent = memory.allocate()
    view = lent[2:4]
    other = memory.allocate()
    assert not np.shares_memory(lent, other)
    del lent
    assert not np.shares_memory(memory.allocate(), view)  # which shows the first block still
    del view
    assert np.shares_memory(memory.allocate(), first)
