"""The programs in examples/: those for TensorFlow and Keras in one launch, others on their own."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launch, run_ranks, start
from run_files import summary_of
from tensorflow_environment import keras_variables, tensorflow_python

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
# A session needs graphs without eager mode, for the rest of the process.
LAST = "tensorflow_session.py"
PROGRAMS = (
    *("keras_callbacks.py", "keras_fit.py", "mlflow_mnist.py", "tensorflow_tape.py"),
    *("torch_loop.py", LAST),
)
# Without TensorFlow and Keras.
ELSEWHERE = (
    *("accelerate_loop.py", "cntk_convnet.py", "ddp_loop.py", "lightning_fit.py"),
    "run_function.py",
)
RECIPE, OPTIONS = "power_demand.py", "power_demand.yaml"


def test_every_example_is_run_and_listed() -> None:
    found = {path.name for path in EXAMPLES.glob("*.*")}
    assert found == {*PROGRAMS, *ELSEWHERE, RECIPE, OPTIONS, "accelerate.yaml", "README.md"}
    found |= {f"notebooks/{path.name}" for path in (EXAMPLES / "notebooks").iterdir()}
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}]" in listed for name in found - {"README.md"})


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_examples(size: int, tmp_path: Path) -> None:
    done = run_ranks(
        HERE / "examples_worker.py",
        size,
        args=PROGRAMS,
        python=tensorflow_python(),
        env=keras_variables(),
        cwd=tmp_path,
        timeout_seconds=600,
    )
    first, last = done.results[0], done.results[-1]
    for program in PROGRAMS:
        assert first[program]["accuracy"] >= 0.9, program
        assert first[program]["weights"] == last[program]["weights"]
        assert bool(first[program]["weights"]) is (program != LAST)
        if program.startswith(("keras", "tensorflow_tape")):  # traced, not called for each batch
            assert 2 <= first[program]["calls"] <= 10
    assert done.stdout.count(f"on {size} ranks") == len(PROGRAMS)  # one rank speaks
    assert (tmp_path / "checkpoints" / "digits-5.keras").exists()
    assert list((tmp_path / "checkpoints-session").glob(f"model.ckpt-{400 // size}.*"))
    if size == 2:
        _check_mlflow(tmp_path, first["mlflow_mnist.py"]["accuracy"])


@pytest.mark.parametrize("name", ["horovod_script", "keras_fit"])
def test_a_notebook_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    text = (EXAMPLES / "notebooks" / f"{name}.ipynb").read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells))
    python = tensorflow_python() if name == "keras_fit" else sys.executable
    argv = [python, "-m", "IPython", "--no-banner", script]
    done = start(argv, env={"IPYTHONDIR": tmp_path}).end(code=0)
    shown = [line for cell in cells for output in cell["outputs"] for line in output["text"]]
    figure = re.compile(r"[\d.]+%")
    assert figure.sub("%", done.stdout) == figure.sub("%", "".join(shown))


def _check_mlflow(directory: Path, accuracy: float) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    experiment = client.get_experiment_by_name("mnist")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    expected = {"epochs": "5", "batch_size": "64", "lr": "0.05", "momentum": "0.9", "ranks": "2"}
    assert run.data.params == expected
    assert run.data.metrics["test_accuracy"] == pytest.approx(accuracy)
    assert run.outputs is not None
    (output,) = run.outputs.model_outputs
    files = [file.path for file in client.list_logged_model_artifacts(output.model_id, "data")]
    assert files == ["data/model.pt2"]
    (checkpoint,) = directory.glob("mnist-*/checkpoint-5.pt")
    weights = torch.load(checkpoint, weights_only=True)["model"]
    model = torch.export.load(next((directory / "mlruns").rglob("model.pt2")))
    assert all(torch.equal(model.state_dict[name], weights[name]) for name in weights)


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


@pytest.mark.soak
@pytest.mark.skipif(find_spec("aeon") is None, reason="needs pip install --no-deps aeon")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_published_result(size: int, tmp_path: Path) -> None:
    words = ["train", EXAMPLES / RECIPE, "--config", EXAMPLES / OPTIONS, "--out", tmp_path / "out"]
    launch(["-m", "hvdtrain"], size, args=words, env={"OMP_NUM_THREADS": "1"}).end(code=0)
    assert summary_of(tmp_path / "out")["final"]["accuracy"] >= 0.955  # two deviations less
