"""How tests compile the kernels, and for which instruction sets."""

from __future__ import annotations

import os
import shutil

import pytest

__all__ = ["COMMON", "LEVELS", "ONCE", "gcc", "supports"]

COMMON = (
    *("-std=c11", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
)
# Else GCC compiles functions several times, and has them chosen before a sanitizer is at work.
ONCE = "-DFAST=static"
# As the clones in the kernels are.
LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4")
# What each needs beside the ones before, as /proc/cpuinfo names it: pni is SSE3, abm has lzcnt.
FLAGS = {
    "x86-64": "cmov cx8 fpu fxsr mmx sse sse2 syscall",
    "x86-64-v3": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 "
    "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}


def gcc() -> str:
    """Return the compiler; only where there is none are the kernels not tested."""
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("no gcc, which compiles the kernels anew: apt install g++")
    return found


def supports(level: str) -> bool:
    """Return whether this processor has such instructions."""
    machine = os.uname().machine
    if machine != "x86_64":
        return False
    with open("/proc/cpuinfo", encoding="ascii") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    needed = [flag for other in LEVELS[: LEVELS.index(level) + 1] for flag in FLAGS[other].split()]
    return set(needed) <= set(flags)
