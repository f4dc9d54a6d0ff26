"""`hvdtrain why` names the first failure of jobs that died in planted ways."""

import re
import signal
import socket
from pathlib import Path

import pytest
from hvdtrain_report.flight import Note, Rank
from hvdtrain_report.told import read_told
from hvdtrain_report.why import ADVICE, explain, judge
from hvdtrain_report.why_command import command
from ranks import launch

from hvdtrain.errors import UsageError
from hvdtrain.topology import format_ranks

FOLDER = Path(__file__).parent
CANCELLED = "slurmstepd: error: *** STEP 1042.0 ON node7 CANCELLED AT 2026-11-30T03:12:45"
SLURM = {
    "time limit": f"{CANCELLED} DUE TO TIME LIMIT ***",
    "preempted": f"{CANCELLED} DUE TO PREEMPTION ***",
    "cancelled": f"{CANCELLED} ***",
    "out of memory": "slurmstepd: error: Detected 1 oom_kill event in StepId=1042.0. Some of the "
    "step tasks have been OOM Killed.",
}
# An error that all ranks raise names those that wrote it before the first one ended the job.
ONE, ANY, JOB = "rank 1", r"(?:rank|ranks) [0-2][-, 0-2]*", "the job"
KILL = (ONE, "killed", "killed by signal 9 (SIGKILL)")
SILENT = "ended without a word"


def why(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    assert not command.main(list(map(str, words)), standalone_mode=False)
    return capsys.readouterr().out.splitlines()


def named(lines: list[str], who: str, cause: str, text: str) -> None:
    """Check what was said about a death."""
    assert re.match(f"{who} ?(?:on {socket.gethostname()} )?failed first", lines[0]), lines
    assert text in lines[0], lines
    assert lines[-1] == f"  try: {ADVICE[cause]}"
    assert len(lines) <= 5


# By death: who, the cause, what is said, what the record alone says ("": it is not enough), and the
# causes where words of the scheduler are added to the output.
DEATHS: dict[str, tuple[str, str, str, str, dict[str, str]]] = {
    "killed": (*KILL, SILENT, {"out of memory": "out of memory"}),
    "all_wait": (
        *(JOB, "terminated", "", "told to end from outside (SIGTERM)"),
        {"time limit": "time limit", "preempted": "preempted", "cancelled": "cancelled"},
    ),
    "is_terminated": (ONE, "terminated", "SIGTERM", "SIGTERM", {}),
    "crashes": (ONE, "segfault", "in crashes", "Segmentation fault", {}),
    "raises": (
        *(ONE, "error", "in raises: ValueError: the planted error", "ValueError"),
        {"cancelled": "error"},
    ),
    "raises_everywhere": (ANY, "error", "ValueError: the planted error", "ValueError", {}),
    "exits_with_3": (ONE, "exit code", "ended with exit code 3", "without a word", {}),
    "exits": (ONE, "left", "its program ended", "its program ended", {}),
    "stalls": (ONE, "stall", "in stalls", "ranks 0, 2 wait for rank 1", {}),
    "differs": (ONE, "different requests", "shape (2,)", "shape (2,)", {}),
    "interrupted": (ONE, "interrupted", "KeyboardInterrupt", "KeyboardInterrupt", {}),
    "recurses": (ONE, "error", "RecursionError", "RecursionError", {}),
    "memory": (ONE, "out of memory", "MemoryError", "MemoryError", {}),
    "outgrows_its_group": (ONE, "out of memory", SILENT, SILENT, {}),
    "fills_disk": (ONE, "disk full", "File too large", "File too large", {}),
    "imports": (ONE, "import", "No module named", "No module named", {}),
    "last": (*KILL, SILENT, {}),
    "before_init": (*KILL, "", {}),
    "in_init": (*KILL, "", {}),
    "import_before_init": (ONE, "import", "No module named", "", {}),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_planted_death_is_named(
    death: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    who, cause, text, alone, causes = DEATHS[death]
    record = tmp_path / "record"
    record.mkdir()
    env: dict[str, object] = {"HVDTRAIN_FLIGHT_RECORD": record}
    if death == "outgrows_its_group":  # such kills are counted for the whole machine
        env["SMALL_GROUP"] = request.getfixturevalue("small_group")
    if death == "stalls":
        # Longer than ranks are late on a busy machine.
        env |= {"HVDTRAIN_STALL_SECONDS": 5, "HVDTRAIN_STALL_SHUTDOWN_SECONDS": 10}
    with launch(FOLDER / "dying_worker.py", 3, args=[death], env=env, cwd=tmp_path) as job:
        if death == "all_wait":
            job.wait_for(lambda: job.stdout.count("waiting") == 3, "waited")
            (line,) = why(capsys, record)
            assert "the job is running: ranks 0-2" in line
            job.process.send_signal(signal.SIGTERM)
        done = job.ended()
    assert done.returncode != 0
    if alone:
        assert alone in why(capsys, record)[0]
    output = tmp_path / "output"
    for words, its_cause in {"": cause, **causes}.items():
        output.write_text(f"{done.stdout}{done.stderr}\n{SLURM.get(words, '')}\n")
        lines = why(capsys, record, "--output", output)
        named(lines, who, its_cause, text if its_cause == cause else "")
        if alone and who == ONE and death not in ("last", "exits", "differs"):
            assert "rank 1 after allreduce 'loss' (operation 5)" in lines[1]
            assert "ranks 0, 2 in allreduce 'loss' (operation 6)" in lines[2]


@pytest.mark.mpich
def test_a_rank_that_mpich_names_by_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mpiexec ends the others before they can say anything."""
    record, output = tmp_path / "record", tmp_path / "output"
    env = {"HVDTRAIN_FLIGHT_RECORD": record}
    done = launch(FOLDER / "dying_worker.py", 3, args=["killed"], env=env, mpi="mpich").end()
    output.write_text(done.stdout)
    named(why(capsys, record, "--output", output), *KILL)


@pytest.mark.parametrize(
    ("text", "who", "cause"),
    [
        ("srun: error: n1: task 2: Killed", "rank 2 on n1", "killed"),
        ("srun: error: n1: tasks 0-2,7: Killed", "the job", "killed"),
        ("lost connection to the tracker\nsrun: error: n1: task 2: Killed", "rank 2", "killed"),
        ("[Mon Nov 2 1:00][1,1]<stderr>: [rank 1/2] KeyError: 'it'", "rank 1", "error"),
        ("[1] ImportError: it", "the job", "import"),
        (
            " 1: ImportError: it\nsrun: error: n1: task 1: Exited with exit code 1",
            "rank 1",
            "import",
        ),
        ("PRTE has lost communication with a remote daemon.", "the job", "node lost"),
    ],
)
def test_what_launchers_say_is_read(text: str, who: str, cause: str) -> None:
    """And nothing like it that the program says."""
    verdict = judge([], read_told(f"epoch 1\n{text}\n"))
    assert verdict.cause == cause
    assert next(explain(verdict, [])).startswith(f"{who} ")


def test_the_fewest_are_named_where_a_message_cuts_lists() -> None:
    cut = format_ranks(range(0, 64, 2))
    for others, ranks in (("ranks 1, 3", (1, 3)), ("ranks 65-99 sent 2; ranks 100-190", (0,))):
        note = Note(1.0, "error", f"MismatchError: {cut} sent 1; {others} sent 3", "", (), 0)
        rank = Rank(0, "a", 0, 0, "mpi", 0, 1.0, 0, [], [note], "", [])
        assert judge([rank], None).ranks == ranks


RECIPES = FOLDER / "dying_recipe.py"


@pytest.mark.parametrize(
    ("arguments", "who", "cause", "text"),
    [
        (["digits", "--lr", "1e30"], "ranks 0, 1", "not finite", "the loss is nan"),
        ([f"{RECIPES}:evaluated"], ONE, "killed", "killed by signal 9 (SIGKILL)"),
        ([f"{RECIPES}:loaded", "--workers", "1"], ONE, "loader", "DataLoader worker"),
    ],
)
def test_a_run_that_died_is_explained_by_its_directory(
    arguments: list[str],
    who: str,
    cause: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    words = ["-m", "hvdtrain", "train", *arguments, "--epochs", "1", "--device", "cpu"]
    done = launch([*words, "--out", str(out)], 2, warm="torch").end()
    assert done.returncode != 0
    output = tmp_path / "output"
    output.write_text(done.stdout + done.stderr)
    named(why(capsys, out, "--output", output), who, cause, text)


def test_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["-m", "hvdtrain", "train", "digits", "--epochs", "1", "--out", str(out)]
    launch(words, 2, warm="torch").end(code=0)
    assert not list(out.glob("flight.*"))
    (line,) = why(capsys, out)
    assert "has ended well" in line
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UsageError):
            why(capsys, wrong)
