"""hvdtrain.keras: one launch for each of Keras's backends, which runs all cases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from horovod_environment import beside_horovod
from ranks import run_ranks
from tensorflow_environment import keras_variables, tensorflow_python

WORKER = Path(__file__).with_name("keras_worker.py")
TRAINING = "ranks_together_give_what_one_gives"
STEPS, FITS = "steps_have_the_bits_of_keras", "fits_saves_and_loads_are_the_same"
WARNING = "plain_optimizers_are_warned_of"


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("tensorflow", 2),
        pytest.param("torch", 2, marks=pytest.mark.soak),
        pytest.param("torch", 3, marks=pytest.mark.soak),
        pytest.param("jax", 2, marks=pytest.mark.soak),
    ],
)
def test_optimizers_fit_and_callbacks(backend: str, size: int) -> None:
    assert len(run(backend, size, [], {})["digests"]) > 5


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("tensorflow", marks=pytest.mark.soak),
        "torch",
        pytest.param("jax", marks=pytest.mark.soak),
    ],
)
def test_one_rank_without_mpi(backend: str) -> None:
    done = run(backend, 1, ["hooks", TRAINING, WARNING], {"HVDTRAIN_ENGINE": "local"})
    assert (done["engine"], len(done["digests"])) == ("local", 1)


@pytest.mark.parametrize(("backend", "size"), [("tensorflow", 2), ("torch", 2), ("jax", 3)])
@pytest.mark.horovod
def test_training_on_horovod(backend: str, size: int) -> None:
    done = run(backend, size, [TRAINING], beside_horovod())
    assert (done["engine"], len(done["digests"])) == ("horovod", 1)


@pytest.mark.long
def test_training_with_jax() -> None:
    cases = [TRAINING, WARNING, "one_rank_evaluates_alone", "float8_trains_as_on_one_rank"]
    done = run("jax", 2, cases, {})
    assert (done["engine"], len(done["digests"])) == ("mpi", 2)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.soak
def test_steps_on_other_numbers_of_ranks(size: int) -> None:
    assert len(run("tensorflow", size, [STEPS, FITS], {})["digests"]) == 2


@pytest.mark.soak
def test_training_on_gloo() -> None:
    done = run("torch", 2, [TRAINING], {"HVDTRAIN_ENGINE": "gloo"})
    assert (done["engine"], len(done["digests"])) == ("gloo", 1)


def run(backend: str, size: int, cases: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    done = run_ranks(
        # As a script of Horovod's is run: one of the cases imports names of Horovod.
        ["-m", "hvdtrain", "script", str(WORKER)],
        size,
        args=cases,
        cases_expected=True,
        python=tensorflow_python(),
        env=keras_variables(backend) | dict(env),
        timeout_seconds=600,
    )
    # Whatever the path, all ranks end with the same bits.
    first: dict[str, Any] = done.results[0]
    assert done.results == [first] * size
    return first
