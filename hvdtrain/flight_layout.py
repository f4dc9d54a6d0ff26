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


def has_ended(process: int) -> bool:
    """Return whether a process of this host has ended, whether or not its parent knows."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"
