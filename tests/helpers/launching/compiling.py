"""How tests compile the kernels, and for which instruction sets."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

COMMON = (
    *("-std=c11", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing"),
)
# Else GCC compiles functions several times, and has them chosen before a sanitizer is at work.
ONCE = "-DFAST=static"
WATCHED = (
    *("-g", "-O1", ONCE, "-fno-sanitize-recover=all"),
    "-fsanitize=address,undefined,float-cast-overflow",
)
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
    found = shutil.which("gcc")
    if found is None:
        pytest.skip("no gcc, which compiles the kernels: apt install g++")
    return found


def supports(level: str) -> bool:
    if os.uname().machine != "x86_64":
        return False
    with open("/proc/cpuinfo", encoding="ascii") as file:
        flags = next(line for line in file if line.startswith("flags")).split()
    needed = [flag for other in LEVELS[: LEVELS.index(level) + 1] for flag in FLAGS[other].split()]
    return set(needed) <= set(flags)


def compile_library(source: Path, level: str, path: Path) -> None:
    flags = (*COMMON, "-O3", ONCE, f"-march={level}", "-shared", "-fPIC")
    subprocess.run([gcc(), *flags, str(source), "-lm", "-o", str(path)], check=True, timeout=300)


def run_watched(driver: Path, source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile a driver, which includes a kernel, with sanitizers, and run it."""
    program = folder / "driver"
    command = [gcc(), *COMMON, *WATCHED, f"-I{source.parent}", str(driver), "-lm", "-o"]
    subprocess.run([*command, str(program)], check=True, timeout=300)
    # Linux may else scatter memory too widely for the sanitizers of GCC 12.
    words = ["setarch", "-R", str(program)]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)
