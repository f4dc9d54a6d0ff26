"""Bad input of some ranks: all say what is wrong, and nothing is trained."""

import json
import sys
from pathlib import Path

import pytest
import torch
from paths import TESTS
from ranks import launch, run_ranks, start

from hvdtrain.train.checkpoint.file import load_checkpoint, write_checkpoint
from hvdtrain.train.checkpoint.saver import checkpoint_files

WORKER = TESTS / "train" / "train_worker.py"
JOB = ["-m", "hvdtrain", "train"]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            ["--lr", 0.1, "--seed", 1],
            ["--lr", 0.2, "--seed", 2],
            "--seed differs between ranks (rank 0: 1; rank 1: 2)",
        ),
        ([], ["--lr", -1], "rank 1: --lr must be a positive number"),
    ],
)
def test_options_of_one_rank(
    first: list[object], second: list[object], words: str, tmp_path: Path
) -> None:
    """mpirun starts several programs in one job: they must have been asked for the same."""
    both = ["digits", "--epochs", 1, "--out", "out"]
    other = [":", "-np", 1, sys.executable, *JOB, *both, *second]
    done = launch(JOB, 1, args=[*both, *first, *other], cwd=tmp_path).end()
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain:")]
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_every_rank_refuses(tmp_path: Path) -> None:
    """What only rank 0 reads is refused on all ranks, in the same words."""
    words = ["train", "digits", "--epochs", 1, "--batch-size", 500, "--out", tmp_path / "run"]
    start([sys.executable, "-m", "hvdtrain", *words]).end(code=0)
    (whole, *_) = checkpoint_files(tmp_path / "run")
    truncated = tmp_path / whole.name
    truncated.write_bytes(whole.read_bytes()[:-1000])
    content = load_checkpoint(whole, "pt")
    content["model"]["8.weight"] = torch.zeros(11, 64)
    eleven = write_checkpoint(tmp_path, 1, 0, content, "pt")
    cases = [
        {"resume": str(truncated)},
        {"resume": str(eleven)},
        *([] if torch.cuda.is_available() else [{"device": "cuda"}]),
    ]
    said = [
        [str(truncated), "damaged"],
        [str(eleven), "another model", "8.weight", "(11, 64)", "(10, 64)"],
        ["--device cuda", "--device cpu"],
    ]
    every = [{"kind": "plain", "out": str(tmp_path / "out"), **case} for case in cases]
    done = run_ranks(WORKER, 2, args=[json.dumps(every)])
    first, second = done.results
    assert first == second
    for result, expected in zip(first, said, strict=False):
        assert all(word in result["refused"] for word in expected), result
    assert not (tmp_path / "out").exists()
