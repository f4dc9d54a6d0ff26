"""An engine call that fails on one rank ends the job, whatever the others are in by then."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from job import Completed
from ranks import launch
from segments import no_new_segments

WORKER = Path(__file__).parent / "faulty_worker.py"


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    with no_new_segments():
        yield


def fail(fault: str, *work: str, np: int = 2, env: Mapping[str, object] | None = None) -> Completed:
    with launch(WORKER, np, args=[fault, *work], env=env) as job:
        job.wait_for_output("the fault")
        done = job.ended(code=1)
    return done


def named(done: Completed) -> set[str]:
    said = r"^\[rank \d/\d\] (?:This happened in (.*)\.|(.*): \w+: .* The job ends: .*)$"
    return {a or b for a, b in re.findall(said, done.stderr, re.MULTILINE)}


@pytest.mark.parametrize(
    ("fault", "work", "operation"),
    [
        ("allreduce:5:1", "allreduce", "allreduce 'numbers'"),
        ("alltoall:4:0", "alltoall", "alltoall 'numbers'"),
        ("start_max:5:1", "allreduce", "allreduce 'numbers'"),
        ("split:0:1", "process_set", "opening a channel"),
        ("start_max:0:1", "shutdown", "leave the job"),
    ],
)
def test_a_call_that_fails(fault: str, work: str, operation: str) -> None:
    done = fail(fault, work)
    assert named(done) == {operation}
    rank = fault.split(":")[2]
    assert f"[rank {rank}/2] Traceback (most recent call last)" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("fault", "work"), [("allgather:1:1", "in_other_orders"), ("empty:0:1", "allreduces")]
)
def test_a_call_for_several_operations_that_fails(fault: str, work: str) -> None:
    (operation,) = named(fail(fault, work, np=3))
    assert "allreduce 'numbers" in operation


@pytest.mark.parametrize("env", [{"HVDTRAIN_SHARED_MEMORY": "0"}, {"HVDTRAIN_ENGINE": "gloo"}])
def test_a_call_that_fails_in_other_engines(env: dict[str, object]) -> None:
    assert named(fail("allreduce:5:1", "allreduce", env=env)) == {"allreduce 'numbers'"}


def test_a_call_that_fails_in_a_step() -> None:
    env = {"HVDTRAIN_FIRST_BUCKET_BYTES": 1000, "HVDTRAIN_BUCKET_BYTES": 1000}
    (operation,) = named(fail("allreduce:12:1", "step", env=env))
    assert operation.startswith("optimizer step")


@pytest.mark.parametrize("fault", ["start_max:0:1", "split:0:1"])
def test_a_call_in_init_that_fails(fault: str) -> None:
    assert "[rank 1/2] Traceback" in fail(fault, "init").stderr


def test_a_program_that_goes_on_after_it() -> None:
    done = fail("allreduce:5:1", "allreduce", "catches")
    assert named(done) == {"allreduce 'numbers'"}
    assert "caught EngineCallError: the engine failed" in done.stdout
    assert "caught HvdtrainError: [rank 1/2] allreduce 'numbers': an earlier" in done.stdout


def test_a_program_that_does_not_ask() -> None:
    done = fail("allreduce:0:1", "unawaited")
    assert named(done) == {"allreduce 'numbers'"}
    assert "Traceback" not in done.stderr
