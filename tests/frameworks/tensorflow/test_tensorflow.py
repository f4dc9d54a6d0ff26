"""hvdtrain.tensorflow: operations, training and graphs of TensorFlow 1, all in one launch."""

from pathlib import Path

import pytest
from horovod_environment import beside_horovod
from ranks import run_ranks
from tensorflow_environment import keras_variables, tensorflow_python

HERE = Path(__file__).parent


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_operations_training_and_graphs(size: int) -> None:
    done = run_ranks(
        HERE / "tensorflow_worker.py",
        size,
        python=tensorflow_python(),
        env=keras_variables(),
        timeout_seconds=600,
    )
    # Whatever the path, all ranks end with the same bits.
    first = done.results[0]
    assert done.results == [first] * size
    assert len(first["digests"]) == 9


@pytest.mark.horovod
def test_training_on_horovod() -> None:
    done = run_ranks(
        HERE / "tensorflow_worker.py",
        2,
        args=["tapes_give_what_one_rank_gives", "layouts_that_differ_between_ranks"],
        python=tensorflow_python(),
        env=keras_variables() | beside_horovod(),
        timeout_seconds=300,
    )
    first = done.results[0]
    assert done.results == [first] * 2
    assert (first["engine"], first["cases"], len(first["digests"])) == ("horovod", 2, 1)


def test_keras_2() -> None:
    done = run_ranks(
        HERE / "tf_keras_worker.py",
        2,
        python=tensorflow_python(),
        env=keras_variables() | {"TF_USE_LEGACY_KERAS": "1"},
        timeout_seconds=300,
    )
    assert len(done.results) == 2
