"""A rank that goes wrong ends the job at once, says why, and leaves nothing behind."""

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hosts import on_hosts
from hvdtrain_report.flight import read_ranks, record_files
from job import Completed
from mpis import MPICH
from ranks import launch, mpi_python, start, torch_beside
from segments import no_new_segments

WORKER = Path(__file__).parent / "failing_worker.py"
MPIS = ("openmpi", MPICH)


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    with no_new_segments():
        yield


def fail(
    fault: str, env: Mapping[str, object] | None = None, mpi: str = "openmpi", **how: Any
) -> Completed:
    env = {**(env or {}), **torch_beside(mpi)}
    with launch(WORKER, 3, args=[fault], env=env, mpi=mpi, **how) as job:
        job.wait_for_output("step 3")
        done = job.ended()
    assert done.returncode != 0
    return done


def noted(folder: Path, rank: int) -> tuple[str, str]:
    """Return what the flight record says of a rank's end, without the place."""
    note = read_ranks(record_files(folder))[rank].notes[0]
    return note.kind, note.text.partition("raises: ")[2] or note.text


@pytest.mark.parametrize(
    ("mpi", "fault", "variables"),
    [
        ("openmpi", "raises", {}),
        pytest.param("openmpi", "raises_in_own_thread", {}, marks=pytest.mark.soak),
        ("openmpi", "raises_in_thread", {"HVDTRAIN_ABORT_ON_THREAD_EXCEPTION": "1"}),
        pytest.param("mpich", "raises", {}, marks=pytest.mark.mpich),
    ],
)
def test_an_exception(mpi: str, fault: str, variables: Mapping[str, str], tmp_path: Path) -> None:
    done = fail(fault, {**variables, "HVDTRAIN_FLIGHT_RECORD": tmp_path}, mpi=mpi)
    assert noted(tmp_path, 1) == ("error", "ValueError: boom")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "[rank 1/3] ValueError: boom" in done.stderr
    assert "[rank 1/3] Traceback (most recent call last)" in done.stderr


@pytest.mark.parametrize(
    ("mpi", "engine", "shared_memory"),
    [
        ("openmpi", "mpi", "1"),
        pytest.param("openmpi", "mpi", "0", marks=pytest.mark.soak),
        ("openmpi", "gloo", "1"),
        pytest.param("mpich", "mpi", "1", marks=pytest.mark.mpich),
        pytest.param("mpich", "mpi", "0", marks=pytest.mark.mpich),
    ],
)
def test_a_rank_that_is_killed(mpi: str, engine: str, shared_memory: str) -> None:
    env = {"HVDTRAIN_ENGINE": engine, "HVDTRAIN_SHARED_MEMORY": shared_memory}
    done = fail("dies", env, mpi)
    assert "Traceback" not in done.stderr
    # Where this machine has fewer cores than ranks, rank 0 has said so at the start.
    told = re.findall(r"^\[rank (\d)/3\] (?!ranks 0-2 on )(.*)$", done.stderr, re.MULTILINE)
    assert len(told) == len(dict(told)), told  # a line for each rank that loses it, at most
    lost = (
        r"agreement: the connection to another rank failed \((Conn|Read)[^)]*\)\. Look at what .*"
    )
    assert all(re.fullmatch(lost, line) for _, line in told), told


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_is_terminated_alone(mpi: str, tmp_path: Path) -> None:
    done = fail("is_terminated", {"HVDTRAIN_FLIGHT_RECORD": tmp_path}, mpi=mpi)
    assert noted(tmp_path, 1) == ("signal", "SIGTERM")
    assert done.returncode == {"openmpi": 128 + signal.SIGTERM, "mpich": signal.SIGTERM}[mpi]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_leaves_while_others_wait(mpi: str) -> None:
    done = fail("leaves", mpi=mpi)
    assert done.returncode == 1
    assert re.search(r"rank 1 left the job while others were in optimizer step", done.stderr)


@pytest.mark.parametrize(
    "fault",
    [
        "leaves_in_the_middle_of_a_step",
        pytest.param("leaves_in_backward_before_its_peers", marks=pytest.mark.soak),
        "leaves_between_backward_and_step",
    ],
)
def test_a_rank_that_leaves_in_a_step(fault: str) -> None:
    done = fail(fault, {"HVDTRAIN_FIRST_BUCKET_BYTES": 1000, "HVDTRAIN_BUCKET_BYTES": 1000})
    assert done.returncode == 1
    assert "rank 1 left the job while others were in" in done.stderr


def test_what_does_not_end_the_job() -> None:
    """Leaving a thread, an exception in one, and ends far apart after a backward without step."""
    code = """
import sys, threading, time, torch, hvdtrain.torch as hvd
hvd.init()
for target, *words in [[sys.exit], [int, f"rank {hvd.rank()}"]]:
    thread = threading.Thread(target=target, args=words, name="loader")
    thread.start()
    thread.join()
print("sum", int(hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum)))
used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=0.1))
used.sum().backward()
time.sleep(4 * hvd.rank())
"""
    done = launch(["-c", code], 2).end()
    assert (done.returncode, done.stdout) == (0, "sum 3\n" * 2)
    # As Python says it, and nothing else.
    assert done.stderr.count("Exception in thread loader:") == 2
    for rank in range(2):
        assert f"ValueError: invalid literal for int() with base 10: 'rank {rank}'" in done.stderr
    assert "[rank" not in done.stderr


def test_an_exception_of_a_rank_whose_output_is_closed() -> None:
    code = """
import sys, torch, hvdtrain.torch as hvd
hvd.init()
if hvd.rank() == 1:
    sys.stdout.close()
    raise ValueError("boom")
hvd.allreduce(torch.ones(1))
"""
    assert "[rank 1/2] ValueError: boom" in launch(["-c", code], 2).end(code=1).stderr


@pytest.mark.parametrize(
    ("mpi", "slots"),
    [
        ("openmpi", [2, 1]),
        pytest.param("openmpi", [1, 1, 1], marks=pytest.mark.soak),
        pytest.param("mpich", [2, 1], marks=pytest.mark.mpich),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_on_one_of_several_hosts(
    mpi: str, slots: list[int], tmp_path: Path
) -> None:
    fail("dies", mpi=mpi, **on_hosts(tmp_path, mpi, slots))


def test_a_launcher_that_is_slow_to_end_the_others(tmp_path: Path) -> None:
    """What they have to say is nothing: the rank that ended and mpirun tell."""
    with launch(["-c", NOTICED], 3, args=[tmp_path]) as job:
        job.wait_for_output("ready")
        job.process.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        told = [tmp_path / "0", tmp_path / "2"]
        job.wait_for(lambda: all(path.exists() for path in told), "told what they noticed")
        job.process.send_signal(signal.SIGCONT)
        done = job.ended(code=3)
    assert "Traceback" not in done.stderr
    assert "has ended while others" not in done.stderr


NOTICED = """
import os, sys, time, torch, hvdtrain.torch as hvd
from pathlib import Path
from hvdtrain.errors import PeerFailureError
folder = Path(sys.argv[1])
hvd.init()
hvd.barrier()
if hvd.rank() == 0:
    print("ready", flush=True)
while not (folder / "go").exists():
    time.sleep(0.01)
if hvd.rank() == 1:
    os._exit(3)
try:
    hvd.allreduce(torch.ones(1))
except PeerFailureError:
    (folder / str(hvd.rank())).touch()
    raise
"""


@pytest.mark.parametrize(
    ("mpi", "shared_memory"),
    [
        pytest.param("openmpi", "0", marks=pytest.mark.soak),
        ("openmpi", "1"),
        pytest.param("mpich", "1", marks=pytest.mark.mpich),
    ],
)
def test_the_launcher_is_killed(mpi: str, shared_memory: str) -> None:
    env = {"HVDTRAIN_SHARED_MEMORY": shared_memory, **torch_beside(mpi)}
    with launch(WORKER, 2, args=["goes_on"], mpi=mpi, env=env) as job:
        job.wait_for_output("step 3")
        job.process.kill()
        job.ended()


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_is_told_to_stop(number: signal.Signals, mpi: str) -> None:
    with launch(WORKER, 2, args=["waits"], mpi=mpi, env=torch_beside(mpi)) as job:
        job.wait_for_output("step 3")
        if number == signal.SIGINT:
            job.interrupt()
        else:
            job.process.send_signal(number)
        done = job.ended()
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mpi", MPIS)
def test_exit_codes_of_all_ranks_together(mpi: str) -> None:
    code = "import sys; from hvdtrain.core import context; context.init(); sys.exit(7)"
    done = launch(["-c", code], 2, mpi=mpi).end(code=7)
    assert "[rank" not in done.stderr


@pytest.mark.mpich
@pytest.mark.parametrize("codes", [(1, 2), (2, 0)], ids=str)
def test_different_exit_codes_under_mpich(codes: tuple[int, int], tmp_path: Path) -> None:
    """Its mpiexec joins them by |, and the page gives no code so made to something else."""
    script = tmp_path / "exits.py"
    script.write_text(
        "import sys\nfrom hvdtrain.core import context\ncontext.init()\n"
        f"sys.exit({codes}[context.current().topology.rank])\n"
    )
    run = [mpi_python("mpich"), "-m", "hvdtrain", "run", "-np", 2, "--", script]
    for job in (start(run), launch(script, 2, mpi="mpich")):
        with job:
            job.ended(code=codes[0] | codes[1])
