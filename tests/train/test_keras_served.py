"""Training with Keras and a parameter server: against plain Keras on one rank, and what it counts.

The protocol and the loops are those of torch, which test_served_training.py tests further.
"""

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tensorflow_environment import keras_variables, tensorflow_python

WORKER = Path(__file__).with_name("keras_served_worker.py")
LIMIT_SECONDS = 600
# 203 samples in rounds of 24: 9 rounds in each of two epochs, in which all workers have samples.
ROUNDS = 2 * 9
# Of one worker, in float32: a compiled step may round otherwise than servers do.
ONE_WORKER = {"torch": 0.0, "tensorflow": 1e-6 * ROUNDS, "jax": 1e-6 * ROUNDS}
# Of two, in float64: Keras computes in float32 matrix products on torch, and tanh on jax.
TWO_WORKERS = {"torch": 1e-6, "tensorflow": 1e-12, "jax": 1e-6}


@pytest.mark.parametrize(
    "backend",
    ["torch", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tensorflow", "jax"))],
)
def test_three_ranks(backend: str, tmp_path: Path) -> None:
    done = run_ranks(
        WORKER,
        3,
        args=[tmp_path],
        python=tensorflow_python(),
        env=keras_variables(backend),
        timeout_seconds=LIMIT_SECONDS,
    )
    runs: dict[str, list[dict[str, Any]]] = {
        name: [result[name] for result in done.results] for name in done.results[0]
    }
    for name, of_ranks in runs.items():
        digests = {digest for one in of_ranks for digest in one.get("weights_sha256", ())}
        assert len(digests) == ("refused" not in of_ranks[0]), name
    check_exactness(runs, backend)
    assert [runs[name][0]["steps"] for name in ("reduced", "served")] == [3 * 9, 4 * 9]
    refused = {name: of_ranks[-1].get("refused", "") for name, of_ranks in runs.items()}
    assert "clipnorm=1.0 of the recipe's optimizer SGD: leave it out" in refused["clipped"]
    assert "the constraint of net/limited/kernel: servers hold parts" in refused["limited"]
    assert "the recipe's optimizer Lamb: servers step on parts of parameters" in refused["lamb"]


def check_exactness(runs: dict[str, list[dict[str, Any]]], backend: str) -> None:
    """One worker is plain Keras, and synchronous workers are it with the whole batch."""
    distances = {name: of[0]["distance"] for name, of in runs.items() if "distance" in of[0]}
    print(distances)
    for name in ("sgd", "adamw", "resumed"):
        assert distances[name] <= ONE_WORKER[backend], name
    assert distances["sync"] <= TWO_WORKERS[backend]
    for name, of_one_kind in (("adamw", "servers"), ("sync", "workers")):  # two of them
        counts = runs[name][0]["parameter_server"]
        assert counts["staleness"] == {"0": 2 * ROUNDS}, of_one_kind
