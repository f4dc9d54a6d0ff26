"""The C++ compiler that is given to Horovod's build, run as a program of its own."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

_STANDARD = re.compile(r"-std=(c|gnu)\+\+(0x|11|1y|14|1z|17)")
_FRAMEWORKS = ("torch", "tensorflow")  # the folders of the sources that include them
_RUNPATH = "-Wl,-rpath"
# XLA's operations need a header that TensorFlow's wheel does not ship; they are optional.
_LEFT_OUT = "xla_mpi_ops.cc"
# Debug symbols take half of the time and nine tenths of the size; warnings are for Horovod's
# developers, and take a tenth.
_DROPPED = (_RUNPATH, "-g", "-Wall")


def rewrite(arguments: Sequence[str], runpath: str) -> list[str]:
    """Return the arguments for the real compiler."""
    compiles = "-c" in arguments
    changed = [f"{_RUNPATH},{runpath}"]
    if compiles:
        sources = [argument for argument in arguments if argument.endswith(".cc")]
        folders = {os.path.basename(os.path.dirname(source)) for source in sources}
        standard = "-std=gnu++17" if folders.isdisjoint(_FRAMEWORKS) else "-std=gnu++20"
        changed = [standard, "-w", "-include", "cstdint"]
    before = ""
    for argument in arguments:
        if compiles and os.path.basename(argument) == _LEFT_OUT:
            changed += ["-x", "c++", os.devnull]
        elif before == _RUNPATH:
            changed.append(argument.replace("-Wl,", "-Wl,-rpath-link,", 1))
        elif argument.startswith(f"{_RUNPATH},"):
            changed.append(argument.replace(_RUNPATH, "-Wl,-rpath-link", 1))
        elif argument not in _DROPPED and not _STANDARD.fullmatch(argument):
            changed.append(argument)
        before = argument
    return changed


def script(compiler: Sequence[str], runpath: str) -> str:
    """Return a shell script that replaces a compiler."""
    words = [sys.executable, "-I", "-S", os.path.abspath(__file__), runpath, shlex.join(compiler)]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


if __name__ == "__main__":
    runpath, compiler, *arguments = sys.argv[1:]
    words = [*shlex.split(compiler), *rewrite(arguments, runpath)]
    os.execvp(words[0], words)
