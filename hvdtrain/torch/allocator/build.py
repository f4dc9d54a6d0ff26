"""Compilation of the allocator against the headers of the installed PyTorch, once per version."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch

__all__ = ["AllocatorError", "build"]

_SOURCE = Path(__file__).with_name("gradient_allocator.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_SECONDS = 120


class AllocatorError(Exception):
    """There is no usable allocator; the message says why."""


def build(environ: Mapping[str, str]) -> Path:
    """Return the library, compiled now unless the cache has it (local; seconds if compiled).

    Args:
        environ: environment variables.

    Raises:
        AllocatorError: it cannot be compiled, or not be kept.
    """
    library = _library(environ)
    if library.is_file():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, library.name)
            _compile(_find_compiler(environ), made, environ)
            os.replace(made, library)  # at once, for processes that look for it meanwhile
    except OSError as error:
        raise AllocatorError(
            f"it cannot be kept in {library.parent} ({error.strerror}): set XDG_CACHE_HOME to a "
            "folder that you may write to"
        ) from error
    return library


def _library(environ: Mapping[str, str]) -> Path:
    """Return the file in the cache for this source and this PyTorch."""
    facts = (torch.__version__, torch.version.git_version, _abi(), platform.machine())
    text = _SOURCE.read_bytes() + repr(facts).encode()
    digest = blake2b(text, digest_size=8).hexdigest()
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return Path(base, "hvdtrain", "allocator", f"torch{torch.__version__}-{digest}.so")


def _abi() -> int:
    return int(torch.compiled_with_cxx11_abi())


def _find_compiler(environ: Mapping[str, str]) -> list[str]:
    named = shlex.split(environ.get("CXX", ""))
    for words in [named] if named else [[name] for name in _COMPILERS]:
        if path := shutil.which(words[0], path=environ.get("PATH", "")):
            return [path, *words[1:]]
    raise AllocatorError(
        f"no C++ compiler ({' '.join(named) or ', '.join(_COMPILERS)}): apt install g++, or load "
        "your site's compiler module"
    )


def _compile(compiler: list[str], library: Path, environ: Mapping[str, str]) -> None:
    beside = Path(torch.__file__).parent
    flags = ["-std=gnu++20", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={_abi()}"]
    # PyTorch has loaded these libraries, wherever they are.
    places = ["-isystem", str(beside / "include"), "-L", str(beside / "lib")]
    command = [*compiler, *flags, *places, str(_SOURCE), "-o", str(library), "-lc10", "-ltorch_cpu"]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise AllocatorError(f"{compiler[0]} takes more than {_TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise AllocatorError(f"{compiler[0]} does not compile it: {lines[0]}")
