"""Scripts with Keras and TensorFlow go on when a rank is killed, with the functions they have."""

from pathlib import Path
from typing import Any

import pytest
from ranks import launch
from tensorflow_environment import keras_variables, tensorflow_python

WORKER = Path(__file__).parent / "elastic_keras_worker.py"
STEPS = [[epoch, batch] for epoch in range(3) for batch in range(4)]
KILLED = [1, 2]


def survive(backend: str, case: str, ranks: int, victim: int) -> list[dict[str, Any]]:
    with launch(
        WORKER,
        ranks,
        args=[case, victim],
        python=tensorflow_python(),
        env=keras_variables(backend),
        launcher_args=["--with-ft", "ulfm"],
    ) as job:
        job.ended(600, code=0)
        return job.results_of_those_left({*range(ranks)} - {victim})


@pytest.mark.parametrize(
    ("backend", "case", "ranks", "victim"),
    [
        ("tensorflow", "function", 3, 1),
        pytest.param("tensorflow", "fit", 3, 0, marks=pytest.mark.soak),
        pytest.param("tensorflow", "eager", 3, 2, marks=pytest.mark.soak),
        pytest.param("tensorflow", "fit", 2, 1, marks=pytest.mark.soak),
        pytest.param("torch", "fit", 3, 1, marks=pytest.mark.soak),
        pytest.param("jax", "fit", 3, 0, marks=pytest.mark.soak),
    ],
)
def test_a_rank_is_killed(backend: str, case: str, ranks: int, victim: int) -> None:
    done = survive(backend, case, ranks, victim)
    assert [each["rank"] for each in done] == list(range(ranks - 1))
    for each in done:
        for name, result in each["results"].items():
            again = [KILLED] if name == case else []  # the step that was broken off
            assert result["seen"] == sorted([*STEPS, *again]), name
            assert result["resets"] == ([ranks - 1] if name == case else []), name
