"""docs/accelerate.md: its programs run under `exec`, on gloo and on hvdtrain's backend."""

import re
from pathlib import Path

import pytest
import torch
from environments import named_python
from ranks import run_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "accelerate.md"
START, ACCELERATE, TRANSFORMERS = re.findall(
    r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
BACKEND = "\nassert torch.distributed.get_backend() == {!r}\n"
# Each row has another number of tokens that count.
TOKENS = (
    TRANSFORMERS.replace("BertForSequenceClassification", "BertLMHeadModel")
    .replace("row[0] % 2", "torch.where(torch.arange(8) < 2 + row[0] % 7, row, -100)")
    .replace("    average_tokens_across_devices=False,\n", "")
)
QUIET = {"OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, "PYTHONWARNINGS": "ignore"}


def run(program: str, backend: str, np: int, folder: Path, python: Path | None = None) -> str:
    begin = START if backend == "hvdtrain" else "import torch\n"
    if backend == "gloo" and program != ACCELERATE:
        begin += 'torch.distributed.init_process_group("gloo")\n'  # it asks for the size early
    script = folder / f"{backend}_{np}.py"
    script.write_text(begin + program + BACKEND.format(backend))
    words = ["-m", "hvdtrain", "exec", str(script)]
    return run_ranks(words, np, env=QUIET, python=python).stdout


def alone() -> float:
    """Return the error that one process gets without Accelerate."""
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.sum(1, keepdim=True).sin()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.arange(96).split(12) * 5:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.nn.functional.mse_loss(model(inputs[:23]), targets[:23]).item()


@pytest.mark.parametrize("backend", ["hvdtrain", pytest.param("gloo", marks=pytest.mark.soak)])
def test_accelerate(backend: str, tmp_path: Path) -> None:
    errors = re.findall(r"rank \d: error (\d\.\d+)", run(ACCELERATE, backend, 2, tmp_path))
    assert [float(error) for error in errors] == pytest.approx([alone()] * 2, abs=1e-4)


@pytest.mark.transformers
@pytest.mark.parametrize("program", [TRANSFORMERS, TOKENS], ids=["rows", "tokens"])
def test_transformers(program: str, tmp_path: Path) -> None:
    """One rank and two have equal weights, on both backends."""
    python = named_python("HVDTRAIN_TRANSFORMERS_PYTHON", "transformers")
    norms: list[float] = []
    for backend, np in (("hvdtrain", 1), ("hvdtrain", 2), ("gloo", 2)):
        said = run(program, backend, np, tmp_path, python)
        lines = re.findall(rf"rank \d of {np}: (\d+\.\d+)", said)
        assert len(lines) == np, said
        norms += map(float, lines)
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-6)
