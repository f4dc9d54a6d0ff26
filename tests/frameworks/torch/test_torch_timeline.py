"""The timeline of 2 to 4 ranks is in the trace event format, and tells what happened when."""

from pathlib import Path
from typing import Any

import pytest
from horovod_environment import horovod_python
from mpis import MPICH
from ranks import launch, run_ranks
from trace_file import Trace

WORKER = Path(__file__).parent / "torch_timeline_worker.py"
BUCKETS = {"HVDTRAIN_BUCKET_BYTES": 6600, "HVDTRAIN_FIRST_BUCKET_BYTES": 6600}
ENDS = ("start", "end")
LATE_MICROSECONDS = 400_000  # in the worker, too
KINDS = {
    "allreduce 'late'", "allgather 'gathered'", "broadcast 'sent'", "alltoall 'exchanged'",
    "reducescatter 'scattered'", "barrier", *(f"allreduce 'any {number}'" for number in range(6)),
}  # fmt: skip
BARRIERS = (
    "from hvdtrain.core import context, operations; context.init();"
    "operations.barrier(context.current().world)"
)
# When timelines start and end: how long that takes a rank, and by how much its clock is ahead.
Calls = dict[str, dict[str, Any]]


@pytest.mark.parametrize(
    ("np", "ahead", "faster"),
    [(2, 0, 0), (3, 1000, 0.01), pytest.param(4, 0, 0, marks=pytest.mark.soak)],
)
def test_all_ranks_are_in_one_file(np: int, ahead: float, faster: float, tmp_path: Path) -> None:
    calls: list[Calls] = run_ranks(
        WORKER, np, args=[tmp_path, ahead, faster], env=BUCKETS, timeout_seconds=300, warm="torch"
    ).results
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.json", "second.json"]
    first, second = (Trace(tmp_path / f"{name}.json", np) for name in ("first", "second"))
    every = range(np)
    check_phases(first, np)
    check_one_clock(first, np, tolerance_of(first, calls))
    check_clocks(first, calls, ahead)
    check_process_set(first, [0, 2] if np > 2 else [1])
    check_buckets(first, np)
    rounds = [e for e in first.events if e["ph"] == "i"]
    assert {(e["name"], e["s"], e["pid"]) for e in rounds} == {("round", "t", r) for r in every}

    assert not [e for e in second.events if e["ph"] == "i"]
    assert set(second.of("allreduce 'again'", "moving")) == set(every)
    sent = {s.subject for s in second.slices if "cast" in s.subject or "gather" in s.subject}
    agreed = "allgather 'broadcast_parameters'"  # all that ranks exchange beside the tensors
    assert sent == {agreed, "broadcast 'weight 0'", "broadcast 'bias 0'"}
    assert "allreduce 'in between'" not in {s.subject for s in first.slices + second.slices}
    assert not {s.subject for s in first.slices} & {"allreduce 'again'"}


def check_phases(trace: Trace, np: int) -> None:
    for rank in range(np):
        for subject in KINDS:
            assert trace.phases(rank, subject) == ["negotiation", "moving"], (rank, subject)
        assert trace.phases(rank, "allreduce 'differs'") == ["negotiation"]
        assert trace.phases(rank, "allreduce 'alone'") == ["negotiation", "moving"]
    (late,) = trace.of("allreduce 'late'", "moving")[0]
    assert late.args == {
        "operation": "allreduce", "name": "late", "op": "average", "bytes": 4000,
        "process set": "world",
    }  # fmt: skip
    refused = trace.of("allreduce 'differs'", "negotiation")
    assert all("sent allreduce" in refused[rank][0].args["error"] for rank in range(np))
    cut = [s for s in trace.slices if s.subject == "allreduce 'cut'"]
    assert {s.rank for s in cut} == {0}
    assert all("under way" in s.args["error"] for s in cut)
    assert trace.content["otherData"]["dropped records"] == {f"rank {r}": 0 for r in range(np)}


def check_one_clock(trace: Trace, np: int, tolerance: float) -> None:
    """Check that what waits for one another does so in the file: no rank moves too early."""
    late = "allreduce 'late'"
    # It is in the queue until the channel's thread gets to it.
    *waiting, last = (
        min(s.start for s in trace.slices if (s.rank, s.subject) == (rank, late))
        for rank in range(np)
    )
    for rank, submitted in enumerate(waiting):
        assert submitted < last - LATE_MICROSECONDS + tolerance
        assert trace.of(late, "negotiation")[rank][0].end > last - tolerance
        blocked = [s for s in trace.of("", "blocked")[rank] if s.end > submitted]
        assert blocked[0].end > last - tolerance
        assert blocked[0].row == "training thread"
    for subject in (name for name in KINDS if name.startswith("allreduce")):
        begun = [trace.of(subject, "negotiation")[rank][0] for rank in range(np)]
        moving = [trace.of(subject, "moving")[rank][0] for rank in range(np)]
        assert min(s.start for s in moving) > max(s.start for s in begun) - tolerance
        # A sum needs the elements of all ranks: none ends before the last has begun.
        assert min(s.end for s in moving) > max(s.start for s in moving) - tolerance


def clocks_of(trace: Trace) -> list[dict[str, float]]:
    clocks: list[dict[str, float]] = trace.content["otherData"]["clocks, in seconds against rank 0"]
    return clocks


def tolerance_of(trace: Trace, calls: list[Calls]) -> float:
    """Return by how many microseconds the file may misplace two events against one another.

    A clock that is faster goes on while it is compared, however long that takes.
    """
    return 1_000 + 2e6 * max(
        clock[f"error at {when}"] + own[when]["ahead"][1] - own[when]["ahead"][0]
        for clock, own in zip(clocks_of(trace), calls, strict=True)
        for when in ENDS
    )


def check_clocks(trace: Trace, calls: list[Calls], ahead: float) -> None:
    """Check the offsets that were found: of one machine exactly 0, of others up to their error."""
    for rank, (clock, own) in enumerate(zip(clocks_of(trace), calls, strict=True)):
        for when in ENDS:
            offset, error = clock[f"offset at {when}"], clock[f"error at {when}"]
            # It is found from when this rank and rank 0 enter and leave the same barriers.
            assert 0 < error <= own[when]["seconds"] + calls[0][when]["seconds"]
            if not ahead or rank == 0:
                assert offset == 0
            else:
                # The clock is not only ahead but also faster.
                before, after = own[when]["ahead"]
                assert before - error <= offset <= after + error


def check_process_set(trace: Trace, ranks: list[int]) -> None:
    rows = {(s.rank, s.row) for s in trace.slices if s.args.get("process set") == "process set 1"}
    assert rows == {(rank, "process set 1") for rank in ranks}
    assert set(trace.of("allreduce 'of a set'", "moving")) == set(ranks)


def check_buckets(trace: Trace, np: int) -> None:
    for rank in range(np):
        steps = [s for s in trace.slices if s.rank == rank and s.row == "bucket plan of world"]
        steps = [s for s in steps if s.args["operation"] == "optimizer step"]
        moving = [s for s in steps if s.phase == "moving"]
        assert len(moving) == len([s for s in steps if s.phase == "negotiation"]) == 2
        assert {s.args["bytes"] for s in moving} == {3 * (40 * 40 + 40) * 4}
        for number in range(3):
            buckets = trace.of(f"bucket {number}", "moving")[rank]
            assert [bucket.args["bytes"] for bucket in buckets] == [(40 * 40 + 40) * 4] * 2
            assert all(bucket.row.startswith("bucket plan of world: buckets") for bucket in buckets)
            for bucket, step in zip(buckets, moving, strict=True):
                assert step.start <= bucket.start <= bucket.end <= step.end


@pytest.mark.parametrize("mpi", ["openmpi", MPICH])
def test_the_environment_starts_it_and_the_end_of_the_job_writes_it(
    mpi: str, tmp_path: Path
) -> None:
    env = {"HOROVOD_TIMELINE": "it.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    env["HVDTRAIN_FLIGHT_RECORD"] = "records"  # beside it
    run_ranks(["-c", BARRIERS], 2, mpi=mpi, env=env, cwd=tmp_path)
    trace = Trace(tmp_path / "it.json", 2)
    assert {slice_.rank for slice_ in trace.slices if slice_.phase == "blocked"} == {0, 1}
    assert set(trace.of("barrier", "moving")) == {0, 1}
    assert {e["name"] for e in trace.events if e["ph"] == "i"} == {"round"}


@pytest.mark.parametrize("mpi", ["openmpi", MPICH])
def test_a_file_that_cannot_be_written_ends_the_job(mpi: str, tmp_path: Path) -> None:
    env = {"HVDTRAIN_TIMELINE": tmp_path / "missing" / "it.json"}
    done = launch(["-c", BARRIERS], 2, mpi=mpi, env=env, cwd=tmp_path).end(code=2)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "timeline" in line]
    assert line.startswith(f"hvdtrain: timeline {tmp_path}/missing/it.json cannot be written (No")


@pytest.mark.horovod
def test_horovods_own_timeline_stays_off(tmp_path: Path) -> None:
    env = {"HVDTRAIN_ENGINE": "horovod", "HOROVOD_TIMELINE": "it.json"}
    ours = "{'it.json', 'it.rank-0.json', 'it.rank-1.json'}"
    code = f"{BARRIERS}; import os; assert set(os.listdir('.')) <= {ours}"
    code += "; assert os.path.samefile('it.json', 'it.rank-0.json')"
    run_ranks(["-c", code], 2, python=horovod_python(), env=env, cwd=tmp_path)
    assert set(Trace(tmp_path / "it.json", 2).of("barrier", "moving")) == {0, 1}
