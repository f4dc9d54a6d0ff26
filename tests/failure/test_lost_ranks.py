"""Ranks that are killed while the others go on, which Open MPI's ULFM makes possible."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hosts import on_hosts
from ranks import launch
from segments import no_new_segments

FOLDER = Path(__file__).parent
TOLERATE = ["--with-ft", "ulfm"]


def survive(target: Any, size: int, left: list[int], env: Mapping[str, object], **how: Any) -> None:
    with no_new_segments(), launch(target, size, env=env, **how) as job:
        job.ended(code=0)
        assert job.results_of_those_left(left) == [left] * len(left)


SETTINGS = {
    "shared memory": {"HVDTRAIN_SHARED_MEMORY": "1"},
    "MPI": {"HVDTRAIN_SHARED_MEMORY": "0"},
    "numpy": {"HVDTRAIN_SHARED_MEMORY": "numpy"},
    "gloo": {"HVDTRAIN_ENGINE": "gloo"},
}


@pytest.mark.parametrize(
    ("worker", "size", "how"),
    [
        ("recovery_worker.py", 8, "shared memory"),
        ("recovery_worker.py", 8, "MPI"),
        pytest.param("recovery_worker.py", 8, "numpy", marks=pytest.mark.soak),
        pytest.param("recovery_worker.py", 8, "gloo", marks=pytest.mark.soak),
        ("lost_training_worker.py", 5, "shared memory"),
        pytest.param("lost_training_worker.py", 5, "MPI", marks=pytest.mark.soak),
    ],
)
def test_the_others_go_on(worker: str, size: int, how: str) -> None:
    env = {**SETTINGS[how], "HVDTRAIN_BUCKET_BYTES": 20_000}
    survive(FOLDER / worker, size, [1, 2], env, launcher_args=TOLERATE)


def test_the_others_go_on_on_two_hosts(tmp_path: Path) -> None:
    # Each host keeps a rank: without any, mpirun has been seen to end the job, with exit code 0.
    how = on_hosts(tmp_path, "openmpi", [2, 6], *TOLERATE)
    survive(FOLDER / "recovery_worker.py", 8, [1, 2], {}, **how)


# Frees by another handle: for a moment this one is neither valid nor null.
FREED = """
from mpi4py import MPI
from hvdtrain.engines.mpi.failures import MpiFailures
from hvdtrain.engines.mpi.flat import free_comm
class Freed(MPI.Intracomm):
    def Free(self):
        MPI.Intracomm(self).Free()
        failures.check()
        failures.revoke()
failures = MpiFailures(MPI.COMM_SELF.Dup(), None)
free_comm(failures, failures._added(Freed(MPI.COMM_SELF.Dup())))
"""


def test_no_communicator_is_asked_while_another_thread_frees_it() -> None:
    launch(["-c", FREED], 1).end(code=0)


# The last rank is killed in the middle of shutdown(), which then stops this part of its context.
LEFT = """
import os, signal, sys
from ranks import report
from hvdtrain.core import context, operations
context.init()
operations.barrier(context.current().world)
if context.current().topology.rank == 2:
    getattr(context.current(), sys.argv[1]).stop = lambda: os.kill(os.getpid(), signal.SIGKILL)
context.shutdown()
report(1, [0, 1])
"""


@pytest.mark.parametrize(("where", "shared_memory"), [("watch", "1"), ("failure_watch", "0")])
def test_a_rank_is_killed_when_all_have_left(where: str, shared_memory: str) -> None:
    """The others end in order: nothing that they would need of it is missing."""
    env = {"HVDTRAIN_SHARED_MEMORY": shared_memory}
    survive(["-c", LEFT], 3, [0, 1], env, args=[where], launcher_args=TOLERATE)


# Some ranks wait in init() for the others, which end when processes look at all of them, or kill
# the former.
STARTS = """
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path
import hvdtrain.torch as hvd
how, waiting, folder, rank = sys.argv[1], sys.argv[2], Path(sys.argv[3]), os.environ["PMIX_RANK"]
def looking():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = path.read_bytes()
            if b"start_watch.py" in line and os.environ["PMIX_NAMESPACE"].encode() in line:
                yield path
if rank in waiting:
    (folder / str(os.getpid())).touch()
    hvd.init()
while len([*folder.iterdir()]) < len(waiting) or len([*looking()]) < min(4, len(waiting)):
    time.sleep(0.05)
time.sleep(1)  # mostly they have looked once; what they have not seen they miss after 10 s
if how == "exit":
    sys.exit(3)
for process in [os.getpid()] if how == "are killed" else map(int, os.listdir(folder)):
    os.kill(process, signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "size", "waiting"),
    [("exit", 3, "02"), ("are killed", 3, "02"), ("exit", 6, "2"), ("kill others", 6, "01234")],
)
def test_ranks_end_before_all_have_started(
    how: str, size: int, waiting: str, tmp_path: Path
) -> None:
    """The job ends, although mpirun leaves it to the ranks, which wait in MPI_Init."""
    args = [how, waiting, tmp_path]
    with launch(["-c", STARTS], size, args=args, launcher_args=TOLERATE) as job:
        done = job.wait()
        assert done.returncode != 0
        job.assert_nothing_left()
    assert done.stderr.count("ended before all had started: the job ends") == 1, done.stderr
