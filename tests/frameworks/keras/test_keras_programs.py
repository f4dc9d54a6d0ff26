"""Random Keras programs give on 1, 2 and 3 ranks what one process gives."""

from __future__ import annotations

import pytest
from find_faults import FAULTS, script
from keras_drawing import draw, known
from program_serving import Ranks
from tensorflow_environment import keras_variables, tensorflow_python


@pytest.mark.parametrize(
    ("backend", "np", "count"),
    [
        ("torch", 2, 30),
        *(
            pytest.param(backend, np, count, marks=pytest.mark.soak)
            # JAX compiles for long.
            for backend, count in (("tensorflow", 30), ("torch", 30), ("jax", 10))
            for np in (1, 2, 3)
            if (backend, np) != ("torch", 2)
        ),
    ],
)
def test_keras_programs_give_what_one_process_gives(backend: str, np: int, count: int) -> None:
    programs = {seed: draw(seed, backend) for seed in range(count)}
    trained = 0
    env = keras_variables(backend) | {"OMP_NUM_THREADS": "1"}
    with Ranks("keras_programs", np, python=tensorflow_python(), env=env) as ranks:
        for seed, program in programs.items():
            if known(program):
                continue
            result = ranks.run(program)
            assert result["outcome"] not in FAULTS, (
                f"seed {seed} on {backend}\n{script('keras_programs', program, result, np)}"
            )
            trained += result["outcome"] == "equal"
    assert trained >= 0.8 * count
