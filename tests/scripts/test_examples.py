"""The programs in examples/, all of them in one launch."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tensorflow_environment import keras_variables, tensorflow_python

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
# A session needs graphs without eager mode, for the rest of the process.
LAST = "tensorflow_session.py"
PROGRAMS = (
    *("keras_callbacks.py", "keras_fit.py", "mlflow_mnist.py", "tensorflow_tape.py"),
    *("torch_loop.py", LAST),
)
# By test_torch_examples.py.
ELSEWHERE = (
    *("accelerate_loop.py", "cntk_convnet.py", "ddp_loop.py", "lightning_fit.py"),
    "run_function.py",
)


def test_every_example_is_run_and_listed() -> None:
    found = {path.name for path in EXAMPLES.glob("*.*")}
    assert found == {*PROGRAMS, *ELSEWHERE, "accelerate.yaml", "README.md"}
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


def _check_mlflow(directory: Path, accuracy: float) -> None:
    """See one run in the store, with parameters, metrics by step, and the model that was tested."""
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
