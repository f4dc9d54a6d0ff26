"""Ignite's Horovod backend runs on hvdtrain, under the names of Horovod."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

SCRIPTS = Path(__file__).parent / "horovod_scripts"
SCRIPT = SCRIPTS / "ignite_training.py"


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
def test_ranks_do_what_one_process_does(np: int, tmp_path: Path) -> None:
    run_ranks(["-m", "hvdtrain", "script", str(SCRIPT), str(tmp_path)], np)
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
