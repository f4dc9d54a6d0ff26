"""The programs in examples/ that need neither TensorFlow nor Keras, on two ranks and on one."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks, start

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
EXEC = ["-m", "hvdtrain", "exec", "--accelerate-config", str(EXAMPLES / "accelerate.yaml")]
AS_THEY_ARE = ("ddp_loop.py", "accelerate_loop.py")
OURS = ("torch_loop.py", "cntk_convnet.py", "lightning_fit.py")


def results(size: int, words: list[str], programs: tuple[str, ...], cwd: Path) -> list[Any]:
    worker = [*words, str(HERE / "examples_worker.py"), *programs]
    done = run_ranks(
        worker, size, cwd=cwd, env={"OMP_NUM_THREADS": 1}, cases_expected=True, timeout_seconds=300
    )
    lines = re.findall(rf"^test accuracy .* on {size} ranks$", done.stdout, re.M)
    assert len(lines) == len(programs)  # one rank speaks
    return done.results


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_torch_examples(size: int, tmp_path: Path) -> None:
    # A launch each: torch.distributed is not joined twice.
    theirs, accelerated = (results(size, EXEC, (name,), tmp_path) for name in AS_THEY_ARE)
    ours = results(size, [], OURS, tmp_path)
    for found in (theirs, accelerated, ours):
        for program, result in found[0].items():
            assert result["accuracy"] >= 0.9, program
            assert all(other[program] == result for other in found)
    # DDP and its form here: the same samples, the same steps, the same average.
    weights = [torch.tensor(theirs[0]["ddp_loop.py"]["weights"])]
    weights.append(torch.tensor(ours[0]["torch_loop.py"]["weights"]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)
    assert (tmp_path / "cntk-convnet" / "images" / "test.txt").exists()


@pytest.mark.soak
def test_block_momentum_goes_on_where_it_was(tmp_path: Path) -> None:
    """CNTK's other learner, and a checkpoint that is found again."""
    script = EXAMPLES / "cntk_convnet.py"
    for epochs in (4, 8):
        args = ["--block-size", 640, "--epochs", epochs]
        done = run_ranks([str(script)], 2, args=args, cwd=tmp_path)
    assert "epoch 4/8" not in done.stdout
    assert "epoch 8/8" in done.stdout
    found = re.search(r"^test accuracy (.*)% on 2 ranks$", done.stdout, re.M)
    assert found is not None
    assert float(found[1]) >= 80


@pytest.mark.soak
def test_ranks_from_python(tmp_path: Path) -> None:
    """It runs on one rank first, then on two; MLflow has a run for each."""
    from mlflow.tracking import MlflowClient

    done = start([sys.executable, EXAMPLES / "run_function.py"], cwd=tmp_path).end(code=0)
    lines = re.findall(r"^test accuracy (.*)% on (\d) ranks, of (.*) samples$", done.stdout, re.M)
    assert [line[1:] for line in lines] == [("1", "[1437]"), ("2", "[719, 719]")]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    runs = {run.data.params["ranks"]: run for run in client.search_runs([experiment.experiment_id])}
    for accuracy, ranks, _ in lines:
        assert float(accuracy) >= 90
        metrics = runs[ranks].data.metrics
        assert metrics["test_accuracy"] == pytest.approx(float(accuracy) / 100, abs=1e-4)
        losses = client.get_metric_history(runs[ranks].info.run_id, "train_loss")
        assert [loss.step for loss in losses] == [0, 1, 2, 3]
        assert (tmp_path / f"digits-{ranks}.pt").exists()
