"""The compiled allocator, tried out before it is used (all local)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_int32, c_uint64, c_void_p
from operator import mul
from pathlib import Path

from hvdtrain.core.allocators.build import AllocatorError

# Two cache lines, which processors prefetch in pairs.
_ALIGNMENT_BYTES = 128


class Blocks:
    """Blocks of an arena, in the order of its memory.

    Args:
        counts: number of blocks of each size in bytes.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        strides = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in counts]
        self.nbytes = sum(map(mul, strides, counts.values()))
        numbers = c_uint64 * len(counts)
        self.arguments = (
            *(self.nbytes, numbers(*counts), numbers(*strides), numbers(*counts.values())),
            len(counts),
        )


class Library:
    """The calls of arena.h, in the allocator of a framework."""

    def __init__(self, path: Path) -> None:
        try:
            self._calls = calls = ctypes.CDLL(str(path))
        except OSError as error:
            raise AllocatorError(f"{path} does not load: {error}") from error
        calls.hvd_arena_open.argtypes = [c_void_p, c_uint64, *[POINTER(c_uint64)] * 3, c_int32]
        calls.hvd_arena_open.restype = c_void_p
        for call in (calls.hvd_arena_base, calls.hvd_arena_used):
            call.argtypes, call.restype = [c_void_p], c_uint64
        for call in (calls.hvd_arena_prefer, calls.hvd_arena_close):
            call.argtypes, call.restype = [c_void_p], None
        calls.hvd_arenas.restype = c_uint64

    @property
    def arenas(self) -> int:
        """Number of arenas that are mapped in this process."""
        return int(self._calls.hvd_arenas())

    def open(self, address: int, blocks: Blocks) -> int | None:
        """Open an arena; None if the system refuses to map its memory once more."""
        handle: int | None = self._calls.hvd_arena_open(address, *blocks.arguments)
        return handle

    def base(self, handle: int) -> int:
        """Return the address of an arena's first block."""
        return int(self._calls.hvd_arena_base(handle))

    def used(self, handle: int) -> int:
        """Return the number of blocks of an arena in use."""
        return int(self._calls.hvd_arena_used(handle))

    def prefer(self, handle: int) -> None:
        """Let an arena serve allocations before all others."""
        self._calls.hvd_arena_prefer(handle)

    def learn(self, address: int) -> None:
        """Say that an allocation was a gradient, to find further ones by that."""

    def close(self, handle: int) -> None:
        """Let an arena serve no more allocations; blocks in use stay valid."""
        self._calls.hvd_arena_close(handle)
