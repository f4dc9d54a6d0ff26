"""Random Keras programs give on 1, 2 and 3 ranks what one process gives."""

from typing import Any

import pytest
from find_faults import Ranks, count_equal
from keras_drawing import draw
from tensorflow_environment import keras_variables, tensorflow_python

# What is left of programs that have found a fault.
_FOUND: dict[tuple[str, int], list[dict[str, Any]]] = {
    # In eager mode, slices with a sample weight raised an error.
    ("tensorflow", 2): [{"layers": [{"kind": "embedding"}], "eager": True, "steps": [[1, 2]]}]
}


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
    programs: list[tuple[int | None, Any]] = [(n, draw(n, backend)) for n in range(count)]
    programs += [(None, program) for program in _FOUND.get((backend, np), [])]
    env = keras_variables(backend) | {"OMP_NUM_THREADS": "1"}
    with Ranks("keras_programs", np, python=tensorflow_python(), env=env) as ranks:
        assert count_equal(ranks, programs, f" on {backend}") >= 0.8 * count
