"""A framework's allocator of gradients: compiled here, tried, and told what to share (local)."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import subprocess
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_int32, c_uint64, c_void_p
from dataclasses import dataclass
from hashlib import blake2b
from operator import mul
from pathlib import Path

import numpy as np

from hvdtrain.buffer import Elements
from hvdtrain.collective import collective
from hvdtrain.compiled import find_compiler
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.gathers import allocate_if
from hvdtrain.core.places import GradientPlaces
from hvdtrain.engines.communicator import Slices
from hvdtrain.errors import UsageError

_HEADER = Path(__file__).with_name("arena.h")
_TIMEOUT_SECONDS = 120


class AllocatorError(Exception):
    """There is no usable allocator; the message says why."""


@dataclass(frozen=True)
class BuildRecipe:
    source: Path
    name: str
    build: str
    flags: Sequence[str]
    libraries: Sequence[str]


def build(recipe: BuildRecipe, environ: Mapping[str, str]) -> Path:
    """Return the library, compiled now unless the cache has it (local; seconds if compiled)."""
    library = _library(recipe, environ)
    if library.is_file():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _turn(library) as waited:
            if not waited:
                _make(recipe, library, environ)
    except OSError as error:
        raise AllocatorError(
            f"it cannot be kept in {library.parent} ({error.strerror}): set XDG_CACHE_HOME to a "
            "folder that you may write to"
        ) from error
    if not library.is_file():
        raise AllocatorError("another process of this machine could not compile it")
    return library


@contextmanager
def _turn(library: Path) -> Iterator[bool]:
    """Let one process of the machine compile; yield whether this one has waited for another."""
    with library.with_suffix(".lock").open("w") as lock:
        waited = False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # this file system has no locks: each process compiles
        yield waited


def _make(recipe: BuildRecipe, library: Path, environ: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        _compile(recipe, made, environ)
        os.replace(made, library)  # at once, for processes that look for it meanwhile


def _library(recipe: BuildRecipe, environ: Mapping[str, str]) -> Path:
    """Return the file in the cache for this source and this framework."""
    facts = (recipe.name, recipe.build, platform.machine())
    text = recipe.source.read_bytes() + _HEADER.read_bytes() + repr(facts).encode()
    digest = blake2b(text, digest_size=8).hexdigest()
    return _cache(environ) / f"{recipe.name}-{digest}.so"


def _cache(environ: Mapping[str, str]) -> Path:
    named = environ.get("XDG_CACHE_HOME")
    try:
        base = named or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    except RuntimeError as error:  # as in containers whose user has no name
        raise AllocatorError(
            "there is no home directory to keep it in: set XDG_CACHE_HOME to a folder that you "
            "may write to"
        ) from error
    return Path(base, "hvdtrain", "allocator")


def _compile(recipe: BuildRecipe, library: Path, environ: Mapping[str, str]) -> None:
    try:
        compiler = find_compiler(environ)
    except UsageError as error:
        raise AllocatorError(str(error)) from error
    flags = ["-O2", "-fPIC", "-shared", "-I", str(_HEADER.parent), *recipe.flags]
    command = [*compiler, *flags, str(recipe.source), "-o", str(library), *recipe.libraries]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise AllocatorError(f"{compiler[0]} takes more than {_TIMEOUT_SECONDS} s") from None
    except OSError as error:
        raise AllocatorError(f"{compiler[0]} does not run ({error.strerror})") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise AllocatorError(f"{compiler[0]} does not compile it: {lines[0]}")


# Two cache lines, which processors prefetch in pairs.
_ALIGNMENT_BYTES = 128


class Blocks:
    """Blocks of an arena in the order of its memory: the number of those of each size in bytes."""

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
            self.calls = calls = ctypes.CDLL(str(path))
        except OSError as error:
            raise AllocatorError(f"{path} does not load: {error}") from error
        calls.hvd_arena_open.argtypes = [c_void_p, c_uint64, *[POINTER(c_uint64)] * 3, c_int32]
        calls.hvd_arena_open.restype = c_void_p
        for call in (calls.hvd_arena_base, calls.hvd_arena_used):
            call.argtypes, call.restype = [c_void_p], c_uint64
        for call in (calls.hvd_arena_prefer, calls.hvd_arena_close):
            call.argtypes, call.restype = [c_void_p], None
        calls.hvd_learn.argtypes, calls.hvd_learn.restype = [c_void_p, c_void_p], None
        calls.hvd_arenas.restype = c_uint64

    @property
    def arenas(self) -> int:
        """Number of arenas that are mapped in this process."""
        return int(self.calls.hvd_arenas())


# Smaller gradients are copied into their buckets: they stay in the caches until they are added.
LEAST_BYTES = 64 << 10


def blocks_for(sizes: Iterable[int], spare: float = 1.0) -> Blocks | None:
    """Return blocks for gradients of these bytes; None if all are small.

    There is one more of each size, for other tensors of that size, but of the largest ones only if
    these blocks take at most a part `spare` of the gradients' memory.
    """
    counts = Counter(size for size in sizes if size >= LEAST_BYTES)
    left = spare * sum(size * count for size, count in counts.items())
    for size in sorted(counts):
        left -= size
        counts[size] += left >= 0
    return Blocks(counts) if counts else None


class GradientArena:
    """Memory that serves allocations of the size of gradients.

    It serves them while this object exists. What was allocated stays valid.
    """

    def __init__(
        self, library: Library, memory: np.typing.NDArray[np.uint8], blocks: Blocks
    ) -> None:
        self._calls = calls = library.calls
        self._handle = calls.hvd_arena_open(memory.ctypes.data, *blocks.arguments)
        if self._handle is None:
            raise AllocatorError("the system does not map shared memory a second time (mremap)")
        self._base, self._nbytes = calls.hvd_arena_base(self._handle), blocks.nbytes
        self.least_bytes = LEAST_BYTES
        # Then it serves no more allocations; blocks in use stay valid.
        weakref.finalize(self, calls.hvd_arena_close, self._handle)

    @property
    def used(self) -> int:
        return int(self._calls.hvd_arena_used(self._handle))

    def miss(self, address: int) -> None:
        """Say that a gradient lies elsewhere, perhaps in another optimizer's arena, to serve it."""
        self._calls.hvd_learn(address, self._handle)
        self._calls.hvd_arena_prefer(self._handle)

    def offset(self, address: int) -> int | None:
        """Return the offset of an address in the memory; None if it is outside."""
        offset = address - self._base
        return offset if 0 <= offset < self._nbytes else None


_logger = logging.getLogger("hvdtrain")

# Returns the calls of an allocator, compiled on the first call; None if there is none, or the user
# has decided against it.
FindLibrary = Callable[[], Library | None]


def placing_slices(channel: Channel) -> Slices | None:
    """Return slices of memory that is shared later, as suitable_slices() would."""
    slices = channel.communicator.slices()
    if slices is None or slices.owners == 1 or not slices.adds_placed:
        return None
    return slices


def suitable_slices(channel: Channel, memory: Elements) -> Slices | None:
    """Return the slices of memory, if gradients that lie elsewhere can be added there."""
    slices = placing_slices(channel)
    return slices if slices is not None and slices.copies(memory) is not None else None


@collective
def open_places(
    channel: Channel,
    memory: Elements,
    blocks: Blocks | None,
    parameters: int,
    find: FindLibrary,
    name: str,
) -> tuple[GradientArena, GradientPlaces] | None:
    """Serve allocations from memory of the node, if all ranks can."""
    slices = suitable_slices(channel, memory)
    if blocks is None or slices is None:
        return None
    # The first rank compiles the allocator if that has not been done, and then the others find it.
    wanted = slices.number != 0 or find() is not None
    shared = channel.run(allocate_if(wanted, blocks.nbytes, f"of the gradients of {name}"))
    if not isinstance(shared, np.ndarray) or slices.copies(shared) is None:
        return None
    arena = _open_arena(find(), shared, blocks)
    nbytes = GradientPlaces.table_bytes(parameters)
    table = channel.run(allocate_if(arena is not None, nbytes, f"of the places of {name}"))
    if arena is None or table is None or slices.copies(table) is None:
        return None
    return arena, GradientPlaces(slices, memory, shared, table, parameters)


def _open_arena(
    library: Library | None, shared: np.typing.NDArray[np.uint8], blocks: Blocks
) -> GradientArena | None:
    if library is None:
        return None
    try:
        return GradientArena(library, shared, blocks)
    except AllocatorError as error:
        _logger.info("gradients are copied into their buckets: %s", error)
        return None
