"""The main job on a GPU, which several ranks may share."""

from pathlib import Path

import pytest
from ranks import run_ranks
from run_files import summary_of

MAIN = Path(__file__).with_name("gpu_main.py")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("engine", "np", "amp"),
    [("nccl", 1, "none"), ("nccl", 2, "fp16"), ("nccl", 3, "bf16"), ("mpi", 2, "none")],
)
def test_one_epoch(engine: str, np: int, amp: str, tmp_path: Path) -> None:
    done = run_ranks(
        MAIN,
        np,
        args=[
            *("train", "--epochs", 1, "--device", "cuda", "--share-gpus"),
            *("--engine", engine, "--amp", amp, "--out", tmp_path / "run"),
        ],
        cases_expected=False,
        timeout_seconds=200,
    )
    assert "cuda:0" in done.stdout, done.stdout
    summary = summary_of(tmp_path / "run")
    assert (summary["engine"], summary["world_size"], summary["samples"]) == (engine, np, 1437)
    assert len(set(summary["weights_sha256"])) == 1
    assert summary["final"]["accuracy"] > 0.2  # of one epoch, and 0.1 is chance


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variables", "engine"), [({}, "mpi"), ({"HVDTRAIN_TEST_APART": 1}, "nccl")]
)
def test_what_auto_takes(variables: dict[str, int], engine: str, tmp_path: Path) -> None:
    """NCCL wants a GPU for each rank."""
    args = ["train", "--epochs", 1, "--share-gpus", "--out", tmp_path / "run"]
    run_ranks(MAIN, 2, args=args, env=variables, cases_expected=False, timeout_seconds=200)
    assert summary_of(tmp_path / "run")["engine"] == engine
