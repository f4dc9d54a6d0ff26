"""Compilation of an allocator against the headers of the installed framework, once per version."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from hvdtrain.compiled.compiler import find_compiler
from hvdtrain.errors import UsageError

_HEADER = Path(__file__).with_name("arena.h")
_TIMEOUT_SECONDS = 120


class AllocatorError(Exception):
    """There is no usable allocator; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """How an allocator is compiled."""

    source: Path
    name: str
    build: str
    flags: Sequence[str]
    libraries: Sequence[str]


def build(recipe: Recipe, environ: Mapping[str, str]) -> Path:
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


def _make(recipe: Recipe, library: Path, environ: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        _compile(recipe, made, environ)
        os.replace(made, library)  # at once, for processes that look for it meanwhile


def _library(recipe: Recipe, environ: Mapping[str, str]) -> Path:
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


def _compile(recipe: Recipe, library: Path, environ: Mapping[str, str]) -> None:
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
