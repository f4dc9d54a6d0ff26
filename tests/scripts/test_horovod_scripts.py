"""Scripts written for Horovod, and Ignite's Horovod backend, run unchanged without Horovod."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from horovod_environment import horovod_python
from hosts import AGENT, require_hosts
from job import Completed
from ranks import run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

SCRIPTS = Path(__file__).parent / "horovod_scripts"
SCRIPT = ["-m", "hvdtrain", "script"]
# What job files for Horovod set, and nonsense, which must never break a run.
SETTINGS = {
    "HOROVOD_FUSION_THRESHOLD": "64MB",
    "HOROVOD_CYCLE_TIME": "soon",
    "HOROVOD_CACHE_CAPACITY": "-1",
    "HOROVOD_LOG_LEVEL": "shout",
    "HOROVOD_UNKNOWN": "",
}


def complaints(done: Completed) -> list[str]:
    return [line for line in done.stderr.splitlines() if "start fewer ranks there" not in line]


def serial(size: int, epochs: int) -> tuple[dict[str, torch.Tensor], float]:
    points = runpy.run_path(str(SCRIPTS / "points.py"))
    data, test = points["Points"](48, seed=1), points["Points"](24, seed=2)
    torch.manual_seed(0)
    model = points["Net"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * size, momentum=0.5)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(48, generator=generator)  # as a DistributedSampler has it
        for batch in order.split(4 * size):
            optimizer.zero_grad()
            log_probabilities = model(data.points[batch])
            torch.nn.functional.nll_loss(log_probabilities, data.classes[batch]).backward()
            optimizer.step()
    loss = torch.nn.functional.nll_loss(model(test.points), test.classes).item()
    return model.state_dict(), loss


@pytest.mark.parametrize(
    ("size", "arguments", "env"),
    [(2, ["--start-method", "spawn", "--epochs", "1"], {}), (3, [], SETTINGS)],
)
def test_the_usual_training_script(
    size: int, arguments: list[str], env: dict[str, str], tmp_path: Path
) -> None:
    words = ["run", "-np", size, SCRIPTS / "classifier.py", "--out", tmp_path, *arguments]
    done = start([sys.executable, "-m", "hvdtrain", *words], env=env).end()
    assert (done.returncode, complaints(done)) == (0, [])
    epochs = len(done.stdout.splitlines())
    weights, loss = serial(size, epochs)
    assert epochs == (1 if arguments else 2)
    assert json.loads(done.stdout.splitlines()[-1])["loss"] == pytest.approx(loss, rel=1e-5)
    for rank in range(size):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), weights)


def test_a_script_that_starts_its_own_ranks() -> None:
    words = [sys.executable, *SCRIPT, SCRIPTS / "own_ranks.py", "--num-proc", "2", "--hosts"]
    with start([*words, "localhost:2"]) as job:
        done = job.ended()
    assert (done.returncode, done.stdout, done.stderr) == (0, "(0, 6, 11) (1, 6, 11)\n", "")
    require_hosts()
    done = start([*words, "node1:1,node2:1"], env={"PRTE_MCA_plm_ssh_agent": AGENT}).end()
    # Open MPI 5 warns if what it starts is faster than its own setpgid().
    lines = [line for line in done.stdout.splitlines() if "setpgid(" not in line]
    assert (done.returncode, lines, done.stderr) == (0, ["(0, 6, 11) (1, 6, 11)"], "")


def test_an_elastic_script() -> None:
    done = run_ranks(SCRIPT, 3, args=[SCRIPTS / "elastic.py"], cases_expected=True)
    assert complaints(done) == []


@pytest.mark.horovod
def test_hvdtrain_answers_on_top_of_an_installed_horovod() -> None:
    done = run_ranks(
        SCRIPT,
        2,
        args=["--as-horovod", SCRIPTS / "elastic.py"],
        python=horovod_python(),
        env={"HVDTRAIN_ENGINE": "horovod"},
        cases_expected=True,
    )
    assert done.stderr == ""


def test_a_script_for_a_graph_of_tensorflow() -> None:
    done = run_ranks(
        SCRIPT,
        2,
        args=[SCRIPTS / "graph.py"],
        python=tensorflow_python(),
        env=keras_variables(),
        cases_expected=True,
    )
    assert done.results[0] == done.results[1]


def alone() -> tuple[list[float], float]:
    curve = runpy.run_path(str(SCRIPTS / "curve.py"))
    model, (inputs, targets) = curve["build"](), curve["data"]().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in torch.arange(48).split(12):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    inputs, targets = curve["data"](23).tensors
    error = torch.nn.functional.mse_loss(model(inputs), targets).item()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), error


@pytest.mark.parametrize("np", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ignite_does_on_ranks_what_one_process_does(np: int, tmp_path: Path) -> None:
    run_ranks([*SCRIPT, str(SCRIPTS / "ignite_training.py"), str(tmp_path)], np)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(np)]
    weights, error = alone()
    for rank, result in enumerate(results):
        assert result["backend"] == "horovod"
        assert result["weights"] == results[0]["weights"]
        assert result["weights"] == pytest.approx(weights, rel=1e-12)
        assert result["error"] == pytest.approx(error, rel=1e-6)  # Ignite adds in float32
        assert (result["largest"], result["gathered"]) == (np - 1, list(range(np)))
        assert result["group"] == ([0, 1] if rank < 2 else [rank])
        assert result["sent"] == f"from {np - 1}"
