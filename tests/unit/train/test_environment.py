"""What the directory of a run says about where and from what it ran."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdtrain
from hvdtrain.train import records
from hvdtrain.train.config_file import resolve
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.records import CONFIG, ENVIRONMENT, git_state, write_environment

WHO = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]


def run_git(folder: Path, *words: str) -> str:
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
    run_git(folder, "init", "--quiet")
    assert git_state(folder) is None  # no commit yet
    (folder / "recipe.py").write_text("x = 1\n")
    run_git(folder, "add", "recipe.py")
    run_git(folder, "commit", "--quiet", "--message", "first")
    return folder


def written(folder: Path, options: TrainOptions) -> dict[str, Any]:
    write_environment(folder, options, ["node1", "node1", "node2"])
    facts: dict[str, Any] = json.loads((folder / ENVIRONMENT).read_text())
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, ENVIRONMENT]
    return facts


def test_the_commit_and_whether_it_says_all(repository: Path) -> None:
    commit = run_git(repository, "rev-parse", "HEAD")
    recipe, other = repository / "recipe.py", repository / "other.py"
    assert git_state(repository, recipe) == {"commit": commit, "dirty": False}
    # Results and the like lie about in many a repository.
    other.write_text("")
    assert git_state(repository, recipe) == {"commit": commit, "dirty": False}
    assert git_state(repository, other) == {"commit": commit, "dirty": True}
    recipe.write_text("x = 2\n")
    assert git_state(repository) == {"commit": commit, "dirty": True}


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
    facts = written(folder, options)
    versions = facts.pop("versions")
    assert versions["python"] == sys.version.partition(" ")[0]
    assert versions["hvdtrain"] == hvdtrain.__version__
    assert versions["numpy"] == np.__version__
    assert versions.keys() >= {"torch", "tensorflow", "keras", "jax", "mpi"}
    started = datetime.fromisoformat(facts.pop("started_at"))
    assert started.tzinfo == UTC
    assert before.replace(microsecond=0) <= started <= datetime.now(UTC)
    commit = run_git(repository, "rev-parse", "HEAD")
    assert facts == {
        "command": "python -m 'x y' '--uri=http://***@h/a?token=***'",
        "hosts": ["node1", "node1", "node2"],
        "git": {"recipe": {"commit": commit, "dirty": False}, "working_directory": None},
    }
    assert "secret" not in (folder / CONFIG).read_text()
    assert resolve({"tracking_uri": options.tracking_uri}, folder / CONFIG) == options
