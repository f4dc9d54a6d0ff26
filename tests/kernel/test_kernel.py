"""The compiled kernel by itself, driven at random and watched by the compiler's sanitizers.

The text of the kernel is compiled together with driver.c. Whatever watches it, and whichever
instructions it is compiled to, ranks must get the bits that all other builds get.
"""

import os
import subprocess
from pathlib import Path

import pytest
from compiling import COMMON, LEVELS, ONCE, gcc, supports

import hvdtrain.engines.shared_memory.kernel

SOURCE = Path(hvdtrain.engines.shared_memory.kernel.__file__).with_name("node_kernel.c")
DRIVER = Path(__file__).with_name("driver.c")
SIZES = (1, 2, 3, 5)
TURNS = 1200
LIMIT_SECONDS = 300
# Where Linux scatters memory too widely for the sanitizers of GCC 12.
NO_PLACE = ("unexpected memory mapping", "Shadow memory range interleaves")
THREAD_SANITIZER = ("-g", "-O1", ONCE, "-fsanitize=thread")
# How it is compiled, and whether ranks are threads, which the thread sanitizer needs, or processes.
BUILDS = {
    "threads": (THREAD_SANITIZER, "threads"),
    "memory": (
        ("-g", "-O1", ONCE, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        "processes",
    ),
    "as installed": (("-O3",), "processes"),
}


def build(flags: tuple[str, ...], source: Path, folder: Path) -> Path:
    program = folder / "driver"
    command = [gcc(), *COMMON, *flags, f"-I{source.parent}", str(DRIVER), "-o", str(program)]
    subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
    return program


def run(program: Path, ranks_are: str, size: int) -> str:
    command = [str(program), ranks_are, str(size), str(size), str(TURNS)]
    done = _run(command)
    if any(words in done.stderr for words in NO_PLACE):
        done = _run(["setarch", "-R", *command])
    return done.stderr or f"exit code {done.returncode}" if done.returncode else done.stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
    )


@pytest.mark.soak
def test_ranks_get_the_same_bits_under_all_sanitizers_and_instruction_sets(tmp_path: Path) -> None:
    """Checksums of runs; numbers that no type rounds are compared with a formula as well."""
    builds = dict(BUILDS)
    for level in LEVELS:
        if supports(level):
            builds[level] = (("-O3", ONCE, f"-march={level}"), "processes")
    checksums = {}
    for name, (flags, ranks_are) in builds.items():
        program = build(flags, SOURCE, tmp_path)
        checksums[name] = [run(program, ranks_are, size) for size in SIZES]
    first = checksums["threads"]
    assert all(len(text) == 17 for text in first), first
    assert len(set(first)) == len(SIZES)
    assert checksums == dict.fromkeys(checksums, first)
