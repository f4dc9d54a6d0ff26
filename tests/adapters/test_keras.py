"""hvdtrain.keras: one launch for each of Keras's backends, which runs all cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from tensorflow_environment import tensorflow_python

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("backend", "size"), [("tensorflow", 2), ("torch", 2), ("torch", 3), ("jax", 2)]
)
def test_optimizers_fit_and_callbacks(backend: str, size: int) -> None:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "JAX_PLATFORMS": "cpu"}
    done = run_ranks(
        # As a script of Horovod's is run: one of the cases imports names of Horovod.
        ["-m", "hvdtrain", "script", str(HERE / "keras_worker.py")],
        size,
        cases_expected=True,
        python=tensorflow_python(),
        env={"KERAS_BACKEND": backend, **quiet},
        timeout_seconds=240,
    )
    # Whatever the path, all ranks end with the same bits.
    digests = done.results
    assert digests == [digests[0]] * size
    assert len(digests[0]) > 5
