"""Bad input: one line that says what is wrong, exit code 2, and nothing trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from job import Completed
from paths import TESTS
from ranks import launch, run_ranks, start

from hvdtrain.train.checkpoint.file import load_checkpoint, write_checkpoint
from hvdtrain.train.checkpoint.saver import checkpoint_files

WORKER = TESTS / "train" / "train_worker.py"
JOB = ["-m", "hvdtrain", "train"]


def alone(arguments: Sequence[object], cwd: Path) -> Completed:
    return start([sys.executable, *JOB, *arguments], cwd=cwd).end()


def on_two_ranks(arguments: Sequence[object], cwd: Path) -> Completed:
    return launch(JOB, 2, args=arguments, cwd=cwd).end()


def assert_refused(done: Completed, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain:")]
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            ["--lr", 0.1, "--seed", 1],
            ["--lr", 0.2, "--seed", 2],
            ["--seed differs between ranks (rank 0: 1; rank 1: 2)"],
        ),
        ([], ["--lr", -1], ["rank 1: --lr must be a positive number"]),
    ],
)
def test_options_of_one_rank(
    first: list[object], second: list[object], words: list[str], tmp_path: Path
) -> None:
    """mpirun starts several programs in one job: they must have been asked for the same."""
    both = ["digits", "--epochs", 1, "--out", "out"]
    other = [":", "-np", 1, sys.executable, *JOB, *both, *second]
    done = launch(JOB, 1, args=[*both, *first, *other], cwd=tmp_path).end()
    assert_refused(done, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_weights_moved_ends_the_job(tmp_path: Path) -> None:
    recipe = f"{WORKER.with_name('train_recipes.py')}:drifting"
    words = ["--global-batch-size", 500, "--epochs", 2, "--watch-every", 5, "--device", "cpu"]
    # Otherwise the next step would give all ranks the weights of one.
    done = on_two_ranks([recipe, "--quiet", *words, "--no-shard-optimizer"], tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stderr.replace("\0", "").splitlines()  # which Open MPI adds now and then
    (line,) = [line for line in lines if line.startswith(("hvdtrain:", "[rank "))]
    assert line.startswith("hvdtrain: step 5: weight 'model.0.weight' differs between ranks 0, 1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "it"
    done = alone(["digits", "--epochs", 1, "--batch-size", 500, "--out", directory], Path.cwd())
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def truncated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = checkpoint_files(run)[0]
    path = tmp_path_factory.mktemp("truncated") / whole.name
    path.write_bytes(whole.read_bytes()[:-1000])
    return path


def test_out_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = on_two_ranks(["digits", "--out", tmp_path / "file" / "out"], tmp_path)
    assert_refused(done, str(tmp_path / "file"), "cannot be written")


def test_out_holds_results(run: Path, tmp_path: Path) -> None:
    before = sorted(run.iterdir())
    done = alone(["digits", "--out", run], tmp_path)
    assert_refused(done, str(run), "--resume auto", "--out")
    assert sorted(run.iterdir()) == before


def test_every_rank_refuses(run: Path, truncated: Path, tmp_path: Path) -> None:
    """What only rank 0 reads is refused on all ranks, in the same words."""
    content = load_checkpoint(checkpoint_files(run)[0], "pt")
    content["model"]["8.weight"] = torch.zeros(11, 64)
    eleven = write_checkpoint(tmp_path, 1, 0, content, "pt")
    cases = [
        {"resume": str(truncated)},
        {"resume": str(eleven)},
        *([] if torch.cuda.is_available() else [{"device": "cuda"}]),
    ]
    words = [
        [str(truncated), "damaged"],
        [str(eleven), "another model", "8.weight", "(11, 64)", "(10, 64)"],
        ["--device cuda", "--device cpu"],
    ]
    every = [{"kind": "plain", "out": str(tmp_path / "out"), **case} for case in cases]
    done = run_ranks(WORKER, 2, args=[json.dumps(every)])
    first, second = done.results
    assert first == second
    for result, expected in zip(first, words, strict=False):
        assert all(word in result["refused"] for word in expected), result
    assert not (tmp_path / "out").exists()
