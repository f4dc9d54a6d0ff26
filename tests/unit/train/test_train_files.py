"""Files of a run appear whole or not at all, say from what it ran, and bad places are refused."""

import io
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import metrics_of

import hvdtrain
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing, sync_directory
from hvdtrain.train import records
from hvdtrain.train.config_file import resolve
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.setup import choose_framework
from hvdtrain.train.terminal import Terminal, decay_text, exchange_text, failure_tags, on_terminal


def test_a_file_system_that_does_not_sync_directories(tmp_path: Path) -> None:
    proc = Path("/proc")  # one that does not
    descriptor = os.open(proc, os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(descriptor)
    os.close(descriptor)
    sync_directory(proc)
    sync_directory(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "gone")


@pytest.mark.parametrize("end", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_of_what_was_not_finished(tmp_path: Path, end: type[BaseException]) -> None:
    target = tmp_path / "it"
    target.write_bytes(b"old")

    def write() -> None:
        with replacing(target) as file:
            file.write(b"half")
            file.flush()
            assert len(list(tmp_path.iterdir())) == 2
            raise end

    with pytest.raises(end):
        write()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(300)
    return process.pid


def test_what_another_job_is_writing_stays_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    here = tmp_path / f".unfinished-{socket.gethostname()}-{os.getppid()}"
    killed = tmp_path / f".unfinished-{socket.gethostname()}-{dead_process()}"
    elsewhere = tmp_path / f".unfinished-{socket.gethostname()}x-{dead_process()}"
    for path in (here, killed, elsewhere):
        path.write_bytes(b"half")
    records.prepare_directory(tmp_path)
    assert sorted(tmp_path.iterdir()) == [here, elsewhere]


def test_leftovers_of_another_host_are_removed_after_a_day(tmp_path: Path) -> None:
    path = tmp_path / ".unfinished-elsewhere-1"
    path.write_bytes(b"half")
    day_before = time.time() - 90_000
    os.utime(path, (day_before, day_before))
    records.prepare_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_read_only_directory_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        records.prepare_directory(Path("/proc/self/net"))


LINE = records.MetricsRecord(1, 45, "train", {"loss": 0.5, "accuracy": 0.8}, 0.02, 1000.0, 2.5)


def add(directory: Path, *lines: records.MetricsRecord) -> None:
    records.append_lines(directory, records.METRICS, [line.line() for line in lines])


def test_lines_after_the_checkpoint_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    for name in (records.METRICS, records.STEPS, records.RANKS):
        records.append_lines(
            tmp_path, name, [{"step": step} for step in (45, 90, 91, 135)], sync=False
        )
        with open(tmp_path / name, "a") as file:
            file.write('{"step": 1, "ep')
    records.drop_lines_after(tmp_path, 90)
    for name in (records.METRICS, records.STEPS, records.RANKS):
        lines = (tmp_path / name).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [45, 90]


def test_what_diverged_is_still_json(tmp_path: Path) -> None:
    confusion = [[1.0, float("inf")], [0.0, 2.0]]
    add(tmp_path, replace(LINE, values={"loss": float("nan"), "confusion": confusion}))
    (line,) = metrics_of(tmp_path)
    assert line["loss"] is None
    assert line["confusion"] == [[1.0, None], [0.0, 2.0]]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(UsageError, match=r"^keras is not installed: pip install .*\[keras\]'$"):
        choose_framework(TrainOptions(framework="keras", backend="jax"))
    assert os.environ["KERAS_BACKEND"] == "jax"  # before Keras is imported


def test_what_reads_checkpoints_is_asked_for_before_one_is_written(tmp_path: Path) -> None:
    code = "import sys; sys.modules['safetensors'] = None; from hvdtrain.cli.main import main; "
    argv = [sys.executable, "-c", f"{code}main(['train', '--epochs', '1', '--out', 'run'])"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = "safetensors, which reads checkpoints, is not installed: pip install safetensors"
    assert done.stderr == f"hvdtrain: {expected}\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not list(tmp_path.iterdir())


def test_an_unknown_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    with pytest.raises(UsageError, match="KERAS_BACKEND 'theano': choose from tensorflow, torch"):
        choose_framework(TrainOptions(framework="keras"))


TRAIN = records.MetricsRecord(3, 135, "train", {"loss": 0.5, "accuracy": 0.8}, 0.02, 1000.0, 9.0)


@pytest.mark.parametrize(
    ("schedule", "warmup", "text"),
    [
        *(("constant", 5, ""), ("cosine", 0, ", cosine")),
        *(("cosine", 2, ", cosine from epoch 2 on"), ("step", 2, ", step after epochs 3,6")),
        ("cosine", 9, ", no cosine: the warm-up (9 epochs) takes the whole run"),
    ],
)
def test_how_the_rate_falls(schedule: str, warmup: float, text: str) -> None:
    milestones = "3,6" if schedule == "step" else ""
    options = TrainOptions(epochs=9, schedule=schedule, warmup_epochs=warmup, milestones=milestones)
    assert decay_text(options, options.warmup_epochs, options.epochs) == text


def test_mpirun_passes_on_all_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps a line back until its newline comes."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal(True, bar=True) as terminal:
        terminal.begin("epoch 1/2", 2)
        terminal.show_training(TRAIN)
        terminal.begin("epoch 2/2", 2)  # draws at once
        values = "1000 samples/s  lr 0.02  loss 0.5000, accuracy 80.00%\n"
        assert shown.getvalue().endswith(values), shown.getvalue()
        assert "epoch 1/2" in shown.getvalue()
        terminal.end(["the last line", "with [brackets]"])
        assert "epoch 2/2" not in shown.getvalue().rpartition("\x1b[2K")[2]
        assert shown.getvalue().endswith("\x1b[2Kthe last line\nwith [brackets]\n")
        assert "\x1b[?25l" not in shown.getvalue()  # never hides the cursor


def test_below_a_launcher_its_output_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        for name in [name for name in os.environ if name.startswith(("OMPI_", "PM", "SLURM_"))]:
            monkeypatch.delenv(name)
        assert on_terminal()
        monkeypatch.setenv("PMI_RANK", "0")
        monkeypatch.setenv("PMI_SIZE", "2")
        for shown, expected in (("/dev/pts/3", True), ("pipe:[17]", False)):
            monkeypatch.setattr(os, "readlink", lambda path, shown=shown: shown)
            assert on_terminal() is expected
    os.close(ours)


def test_losses_and_joins_of_ranks_are_tags() -> None:
    lost = records.RanksLost(12, 0.5, 3.0, [1], 2, 0.2, 64, 0.1)
    joined = records.RanksJoined(20, 0.8, 5.0, [2], 3, 0.7, 2.5, 64, 0.1)
    assert failure_tags([lost, replace(lost, lost=[0], ranks=1, left=True)], [joined]) == {
        "lost_at_step_12": "rank 1 ended, 2 ranks left; rank 0 left, 1 rank left",
        "joined_at_step_20": "rank 2, 3 ranks then",
    }


def test_an_exchange_that_compresses_nothing_on_one_host() -> None:
    said = [
        exchange_text(TrainOptions(exchange=name), hosts).partition(" per ")[0]
        for name in ("nbit", "nbit:per_rank=true")
        for hosts in (1, 2)
    ]
    each = "nbit:per_rank=true. Between ranks 1 bit"
    assert said == ["nbit", "nbit. Between nodes 1 bit", each, each]


WHO = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *WHO, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Git has as much time as it needs, however slow the machine is.
    monkeypatch.setattr(records, "_TIMEOUT_SECONDS", 300.0)
    folder = tmp_path / "a repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    assert records.git_state(folder) is None  # no commit yet
    (folder / "recipe.py").write_text("x = 1\n")
    git(folder, "add", "recipe.py")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_the_commit_and_whether_it_says_all(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    recipe, other = repository / "recipe.py", repository / "other.py"
    assert records.git_state(repository, recipe) == {"commit": commit, "dirty": False}
    # Results and the like lie about in many a repository.
    other.write_text("")
    assert records.git_state(repository, recipe) == {"commit": commit, "dirty": False}
    assert records.git_state(repository, other) == {"commit": commit, "dirty": True}
    recipe.write_text("x = 2\n")
    assert records.git_state(repository) == {"commit": commit, "dirty": True}


def test_what_is_written(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-m", "x y", "--uri=http://u:p@ss@h/a?token=t"]
    )
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    options = TrainOptions(
        recipe=str(repository / "recipe.py"),
        set={"width": "64"},
        track="mlflow",
        tracking_uri="http://me:secret@host:5000",
    )
    before = datetime.now(UTC)
    records.write_environment(folder, options, ["node1", "node1", "node2"])
    facts: dict[str, Any] = json.loads((folder / records.ENVIRONMENT).read_text())
    assert sorted(path.name for path in folder.iterdir()) == [records.CONFIG, records.ENVIRONMENT]
    versions = facts.pop("versions")
    assert versions["python"] == sys.version.partition(" ")[0]
    assert versions["hvdtrain"] == hvdtrain.__version__
    assert versions["numpy"] == np.__version__
    assert versions.keys() >= {"torch", "tensorflow", "keras", "jax", "mpi"}
    started = datetime.fromisoformat(facts.pop("started_at"))
    assert started.tzinfo == UTC
    assert before.replace(microsecond=0) <= started <= datetime.now(UTC)
    commit = git(repository, "rev-parse", "HEAD")
    assert facts == {
        "command": "python -m 'x y' '--uri=http://***@h/a?token=***'",
        "hosts": ["node1", "node1", "node2"],
        "git": {"recipe": {"commit": commit, "dirty": False}, "working_directory": None},
    }
    assert "secret" not in (folder / records.CONFIG).read_text()
    assert resolve({"tracking_uri": options.tracking_uri}, folder / records.CONFIG) == options
