"""The stall watch names the ranks that are missing, and keeps quiet while all is well."""

import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from job import Job, is_stopped
from ranks import launch, start

WORKER = Path(__file__).parent / "stalling_worker.py"
WAIT_FOR_THE_LAST = {2: "rank 0 waits for rank 1", 3: "ranks 0, 1 wait for rank 2"}
UNHEARD = "and a rank that prints no such line has not answered for"


def stalls(stderr: str) -> dict[str, set[str]]:
    _, *sections = re.split(r"^CASE (\w+)$", stderr, flags=re.M)
    return {
        case: {
            re.sub(r" 'plan \w+'", "", f"{subject}: {who}")
            for subject, who in re.findall(
                r"^\[rank 0/\d\] stalled: (.*) for \d+ s: (.*)$", text, re.M
            )
        }
        for case, text in zip(sections[::2], sections[1::2], strict=True)
    }


def has_warned(job: Job, case: str, expected: set[str]) -> bool:
    return expected <= stalls(job.stderr).get(case, set())


@pytest.mark.parametrize(
    ("np", "engine", "cases"),
    [(2, "gloo", ["late"]), (3, "mpi", ["healthy", "late", "in_the_middle", "leaving"])],
)
def test_late_ranks_are_named(np: int, engine: str, cases: list[str], tmp_path: Path) -> None:
    last, waits = np - 1, WAIT_FOR_THE_LAST[np]
    in_the_set = {f"allreduce 'set': rank 0 waits for rank {last}"} if np > 2 else set()
    expected = {
        "late": {f"allreduce 'late': {waits}", f"optimizer step: {waits}", *in_the_set},
        "in_the_middle": {f"optimizer step: {waits}; rank {last} submitted a part of it"},
        "leaving": {f"leave the job: {waits}"},
    }
    env = {
        "HVDTRAIN_ENGINE": engine,
        "HVDTRAIN_STALL_SECONDS": 1,
        "HVDTRAIN_FIRST_BUCKET_BYTES": 1000,
        "HVDTRAIN_BUCKET_BYTES": 1000,
    }
    with launch(WORKER, np, args=cases, env=env, cwd=tmp_path) as job:
        for case in filter(expected.__contains__, cases):
            wanted = partial(has_warned, job, case, expected[case])
            job.wait_for(wanted, f"warned in {case} of {expected[case]}")
            (tmp_path / case).touch()
        done = job.wait()
        assert done.returncode == 0
        assert len(job.results(np)) == np
    found = stalls(done.stderr)
    assert found.get("healthy", set()) == set()
    of_the_set = [line for line in found["late"] if line.startswith("allreduce 'set'")]
    assert set(re.findall(r"\d", "".join(of_the_set))) <= {"0", str(last)}
    assert re.search(r"^\[rank 0/\d\] no longer stalled: .*allreduce 'late'", done.stderr, re.M)


# The clock of the watch stands still while ranks start, however late one of them is.
START = """
import ctypes, os, select, signal, sys, threading, time
from pathlib import Path
import numpy as np
from held_clock import HeldClock, await_files
from hvdtrain.buffer import Buffer
from hvdtrain.core import context, operations
from hvdtrain.core.agreement import channel
from hvdtrain.core.horovod_api import init
from hvdtrain.types import ReduceOp
clock = HeldClock(channel)
init()
here = context.current()
rank = here.topology.rank
memory = Buffer.from_array(np.ones(1))
operations.barrier(here.world)
def tell(what):
    Path(f"{what} {rank}").touch()
def tell_that_it_waits(then):
    while not here.world.pending():
        time.sleep(0.01)
    tell("waits")
    then()
def when_it_waits(then):
    threading.Thread(target=tell_that_it_waits, args=[then], daemon=True).start()
"""
BROADCAST = """
operations.broadcast(here.world, memory, (1,), 0, "weights").run()
"""
# Time passes with the looks of the watch, in which all ranks take part.
SITS = """
def sits_here():
    tell("sits")
    time.sleep(600)
def begin():
    await_files("waits 0", "waits 2", "sits 1")
    clock.seconds_per_look = 0.25
if rank == 1:
    sits_here()
when_it_waits(begin)
"""


# Operations that run in each of the ways there are, in a common order.
RUNS = """
twins = [here.open_channel(range(3), "twins") for _ in range(2)]
for _ in range(3):
    two = Buffer.from_array(np.ones(2))
    operations.allreduce(here.world, [two], [(2,)], ReduceOp.SUM, "prepared").run()
    ones = [Buffer.from_array(np.ones(1)) for _ in range(3)]
    reductions = [
        operations.allreduce(here.world, [one], [(1,)], ReduceOp.SUM, f"part:{number}").start()
        for number, one in enumerate(ones)
    ]
    for reduction in reductions:
        reduction.wait()
"""


def analyzed(folder: Path) -> str:
    """Return what torch's analyzer says of flight records, by the commands of the page."""
    page = Path(__file__).parents[2] / "docs" / "stalls.md"
    (code,) = re.findall(r'python -c "(.*?)" FOR_TORCH', page.read_text(), re.DOTALL)
    converted = folder / "for torch"
    start([sys.executable, "-m", "hvdtrain", "why", folder, "--for-torch", converted]).end(code=0)
    return start([sys.executable, "-c", code, converted]).end(code=0).stderr


def test_the_job_ends_by_horovods_variables(tmp_path: Path) -> None:
    env = {
        "HVDTRAIN_FLIGHT_RECORD": tmp_path / "records",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": 1,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": 2,
        "HOROVOD_STALL_CHECK_DISABLE": "perhaps",
        "HVDTRAIN_STALL_STACKS": 1,
    }
    with launch(["-c", START + RUNS + SITS + BROADCAST], 3, env=env) as job:
        done = job.ended(code=1)
    assert "Traceback" not in done.stderr
    stall = r"broadcast 'weights' for \d s: ranks 0, 2 wait for rank 1"
    assert re.search(rf"^\[rank 0/3\] stalled: {stall}$", done.stderr, re.M)
    (end,) = re.findall(r"^.* the job ends .*$", done.stderr, re.M)
    assert re.fullmatch(
        rf"\[rank 0/3\] the job ends \(HVDTRAIN_STALL_SHUTDOWN_SECONDS=2\): {stall}", end
    )
    for rank, function in enumerate(["run", "sits_here", "run"]):
        assert f", in {function}\n" in main_stack(done.stderr, rank)
    found = analyzed(tmp_path / "records")
    converted = json.loads((tmp_path / "records" / "for torch" / "flight_rank_0").read_text())
    assert [g["desc"] for g in converted["pg_config"].values()].count("twins") == 2
    assert re.findall(r"missing ranks: .*|collective: .*|.* has errors", found) == [
        "collective: gloo:broadcast broadcast 'weights'",
        "missing ranks: {1}",
    ]


def main_stack(stderr: str, rank: int) -> str:
    title = rf"(\[ranks?(?: \d,)* {rank}(?:, \d)*/3\])"  # ranks with equal stacks have one
    found = re.search(rf"^{title} MainThread, .*\n((?:\1   .*\n)+)", stderr, re.M)
    assert found, stderr
    return found[2]


# Rank 1's clock shows the pause, and stands still again while others may be late.
STOPS = """
if rank == 1:
    await_files("waits 0", "waits 2")
    clock.go()
    tell("stops")
    os.kill(os.getpid(), signal.SIGSTOP)
    clock.hold()
else:
    when_it_waits(lambda: (await_files("is stopped"), clock.go()))
"""


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    env = {"HVDTRAIN_STALL_SECONDS": 1}
    with launch(["-c", START + STOPS + BROADCAST], 3, env=env, cwd=tmp_path) as job:
        pid = job.rank_pids(3)[1]
        told = tmp_path / "stops 1"
        job.wait_for(lambda: told.exists() and is_stopped(pid), "stopped a rank")
        (tmp_path / "is stopped").touch()
        for rank in (0, 2):
            job.wait_for_output(f" s: rank {rank} waits, {UNHEARD}")
        os.kill(pid, signal.SIGCONT)
        done = job.wait()
    assert done.returncode == 0
    assert "[rank 1/3] stalled" not in done.stderr
    assert "[rank 2/3] no longer stalled: broadcast 'weights'" in done.stderr


# What rank 0 sees in the pipe, rank 1 has written within the call that keeps Python from running:
# there is no room for all of it.
HOLDS_PYTHON = """
pipe = os.open("pipe", os.O_RDWR)
if rank == 1:
    await_files("waits 0")
    ctypes.PyDLL(None).write(pipe, bytes(1 << 20), 1 << 20)
else:
    when_it_waits(lambda: (select.select([pipe], [], []), clock.go()))
"""


def test_a_rank_that_keeps_python_from_running(tmp_path: Path) -> None:
    env = {"HVDTRAIN_STALL_SECONDS": 1, "HVDTRAIN_STALL_SHUTDOWN_SECONDS": 2}
    os.mkfifo(tmp_path / "pipe")
    with launch(["-c", START + HOLDS_PYTHON + BROADCAST], 2, env=env, cwd=tmp_path) as job:
        done = job.ended(code=1)
    end = rf"the job ends .*: broadcast 'weights' for \d+ s: rank 0 waits, {UNHEARD} \d+ s"
    assert re.search(rf"^\[rank 0/2\] {end}", done.stderr, re.M)


ONE_THREAD = """
reduction = operations.allreduce(here.world, [memory], [(1,)], ReduceOp.SUM).start()
clock.go()
time.sleep(1.5)  # with one thread, nothing happens before somebody waits
clock.await_look()
clock.hold()
reduction.wait()
if rank == 1:
    await_files("seen")
else:
    clock.go()
"""


def test_an_mpi_for_one_thread_tells_who_waits(tmp_path: Path) -> None:
    env = {"HVDTRAIN_STALL_SECONDS": 1, "MPI4PY_RC_THREAD_LEVEL": "serialized"}
    with launch(["-c", START + ONE_THREAD + BROADCAST], 2, env=env, cwd=tmp_path) as job:
        job.wait_for_output("stalled: ")
        (tmp_path / "seen").touch()
        done = job.ended(code=0)
    lines = re.findall(r"^\[rank .*stalled: .*$", done.stderr, re.M)
    first, *_, last = [re.sub(r"\d+ s", "N s", line) for line in lines]
    assert first == (
        "[rank 0/2] stalled: broadcast 'weights' for N s: rank 0 waits, and this engine cannot "
        "tell which ranks are missing"
    )
    assert last == "[rank 0/2] no longer stalled: broadcast 'weights'"
