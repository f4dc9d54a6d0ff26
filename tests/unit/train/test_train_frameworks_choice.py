"""Which framework is imported, on what Keras runs, and what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.setup import choose_framework


@pytest.mark.parametrize(
    ("framework", "backend", "missing", "install"),
    [
        ("keras", None, "keras", "'hvdtrain[keras]'"),
        ("keras", "jax", "keras", "'hvdtrain[keras]'"),
    ],
)
def test_what_is_not_installed_is_named(
    framework: str,
    backend: str | None,
    missing: str,
    install: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError) as refusal:
        choose_framework(TrainOptions(framework=framework, backend=backend))
    assert str(refusal.value) == f"{missing} is not installed: pip install {install}"
    assert os.environ["KERAS_BACKEND"] == (backend or "torch")  # before Keras is imported


def test_what_reads_checkpoints_is_asked_for_before_one_is_written(tmp_path: Path) -> None:
    code = "import sys; sys.modules['safetensors'] = None; from hvdtrain.cli.main import main; "
    argv = [sys.executable, "-c", f"{code}main(['train', '--epochs', '1', '--out', 'run'])"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = "safetensors, which reads checkpoints, is not installed: pip install safetensors"
    assert done.stderr == f"hvdtrain: {expected}\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not list(tmp_path.iterdir())


def test_an_unknown_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    with pytest.raises(UsageError, match="KERAS_BACKEND 'theano': choose from tensorflow, torch"):
        choose_framework(TrainOptions(framework="keras"))
