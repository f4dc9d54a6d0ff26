"""`hvdtrain.run(function, ...)`: every rank's result, or the exception of the first that failed."""

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from called import BoomError, UnpicklableError, summed
from job import Job
from ranks import start

import hvdtrain
from hvdtrain.errors import HvdtrainError, UsageError

RANKS = 3


def test_results_come_by_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:  # sockets have short names
        with monkeypatch.context() as patches:
            patches.setattr(tempfile, "tempdir", folder)
            found = hvdtrain.run(summed, args=(2.0,), kwargs={"name": "x"}, np=RANKS)
        assert list(Path(folder).iterdir()) == []
    total = 2.0 * sum(range(1, RANKS + 1))
    assert found == [(rank, [total] * 3, "x") for rank in range(RANKS)]
    said = capfd.readouterr()
    hello = [line for line in said.out.splitlines() if line.startswith("hello")]
    assert sorted(hello) == [f"hello from rank {rank}" for rank in range(RANKS)]
    assert said.err == ""


def test_a_function_of_the_moment_and_large_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # in a job with one task, a notebook's for example
    monkeypatch.setenv("SLURM_NTASKS", "1")
    size = 1 << 20

    def made() -> tuple[Any, int]:
        return np.full(size, int(os.environ.get("OMPI_COMM_WORLD_RANK", -1))), os.getpid()

    (first, one), (second, other) = hvdtrain.run(made, np=2)
    assert (first.sum(), second.sum()) == (0, size)
    assert len({one, other, os.getpid()}) == 3
    assert "HVDTRAIN_CALL_KEY" not in os.environ


def test_a_caller_that_is_the_only_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hvdtrain.run(os.getenv, args=("RANK",), np=2) == ["0", "1"]


def test_the_exception_of_the_rank_that_failed() -> None:
    def fails() -> None:
        import hvdtrain.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise BoomError(7, "told to")
        hvd.barrier()  # in which the others wait for it

    with pytest.raises(BoomError) as caught:
        hvdtrain.run(fails, np=RANKS)
    assert caught.value.args == (7, "told to")
    (note,) = caught.value.__notes__
    assert note.startswith(f"on rank 1 of {RANKS}:\nTraceback")
    assert "in fails" in note


@pytest.mark.parametrize(
    "error", [lambda: ValueError(threading.Lock()), lambda: UnpicklableError(text="told to")]
)
def test_an_exception_that_cannot_be_sent(error: Callable[[], Exception]) -> None:
    def fails() -> None:
        raise error()

    with pytest.raises(HvdtrainError, match=r"(?s)on rank 0 of 1:.*Error: (<unlocked|told to)"):
        hvdtrain.run(fails)


def test_the_end_of_a_rank_is_not_the_end_of_the_caller() -> None:
    with pytest.raises(HvdtrainError, match=r"(?s)on rank 0 of 1:.*SystemExit: 0"):
        hvdtrain.run(sys.exit, args=(0,))


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        hvdtrain.run(threading.Lock)


def test_a_rank_that_ends_without_a_word() -> None:
    def leaves() -> None:
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            os._exit(5)
        time.sleep(600)

    with pytest.raises(HvdtrainError, match=r"rank 0, 1 of 2 ended without a result .*exit code"):
        hvdtrain.run(leaves, np=2)


def test_a_caller_that_is_killed_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:  # sockets have short names
        with _called_to_sleep({"TMPDIR": folder}) as job:
            assert list(Path(folder).glob("hvdtrain-run-*/call"))
            os.kill(_launcher(job), signal.SIGSTOP)  # nor does it end the ranks
            job.process.kill()
            assert job.wait().returncode == -signal.SIGKILL
            job.assert_nothing_left()
        assert list(Path(folder).iterdir()) == []


def test_a_launcher_that_is_killed_leaves_no_ranks() -> None:
    with _called_to_sleep() as job:
        os.kill(_launcher(job), signal.SIGKILL)
        done = job.ended(code=1)
    assert "rank 0, 1 of 2 ended without a result (mpirun's exit code is -9)" in done.stderr


def _called_to_sleep(env: Mapping[str, object] | None = None) -> Job:
    code = """if True:
        import called, hvdtrain
        from hvdtrain.launch import supervise
        supervise._LAUNCHER_SECONDS = 3.0
        hvdtrain.run(called.sleeps, np=2)
    """
    job = start([sys.executable, "-u", "-c", code], env=env)
    job.wait_for_output("sleeps\nsleeps\n")
    return job


def _launcher(job: Job) -> int:
    pid = job.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="np=0 must be at least 1"):
        hvdtrain.run(print, np=0)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UsageError, match="starts ranks itself: call it without"):
        hvdtrain.run(print, np=2)


def test_the_documented_call_beside_a_world_of_ones_own(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
    ((code, printed),) = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    script = tmp_path / "script.py"
    script.write_text(f"import hvdtrain.torch\nhvdtrain.torch.init()\n{code}")
    done = start([sys.executable, script]).end()
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
