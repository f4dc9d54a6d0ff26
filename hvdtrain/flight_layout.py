"""The layout of a flight record, for what writes it and for what reads it."""

from __future__ import annotations

import struct
from pathlib import Path

# Bytes of the block of each rank, and where its parts begin.
BLOCK_BYTES = 1 << 18
LIFE, CHANNELS, NOTES, FAULT, RING = 2048, 4096, 8192, 16384, 24576
# Seconds since the epoch, and the optimizer steps of this job.
SIGN_OF_LIFE = struct.Struct("<dq")
# An operation: place in the ring from 1 on, bytes, time of submission, channel, length of the text.
# Then whether it failed, number among the operations of the channel that ran, begin and end, or 0.
ENTRY, PROGRESS = struct.Struct("<qqdHH"), struct.Struct("<Hqdd")
TEXT = ENTRY.size + PROGRESS.size
ENTRY_BYTES = 256


def begin_of(process: int) -> int:
    """Return when a process of this host began, in ticks after its start; 0 if it has ended."""
    try:
        state, *words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(words[18])


def has_ended(process: int, began: int) -> bool:
    """Return whether a process of this host has ended, whether or not its parent knows.

    Another process may have its number by now, but began later.
    """
    now = begin_of(process)
    return not now or began not in (0, now)
