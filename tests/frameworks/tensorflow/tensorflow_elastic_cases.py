"""horovod.tensorflow.elastic on ranks that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from raising import raising

import hvdtrain.tensorflow as hvd
from hvdtrain.tensorflow import elastic

v1 = tf.compat.v1


def variables_start_from_rank_0_and_go_back() -> None:
    rank = hvd.rank()
    variable = tf.Variable([float(rank), 1.0])
    state: Any = elastic.TensorFlowState([variable], batch=rank)

    @elastic.run
    def train(state: Any, steps: int) -> int:
        assert (state.variables[0].numpy().tolist(), state.batch) == ([0.0, 1.0], 0)
        for _ in range(steps):
            state.variables[0].assign_add([1.0, 1.0])
            state.batch += 1
            if state.batch == 2:
                state.commit()
        return steps

    assert train(state, 3) == 3
    assert variable.numpy().tolist() == [3.0, 4.0]
    state.restore()
    assert (variable.numpy().tolist(), state.batch) == ([2.0, 3.0], 2)
    with raising(ValueError, text="variables"):
        elastic.TensorFlowState()


def a_session_goes_back() -> None:
    with tf.Graph().as_default():
        variable = v1.get_variable("v", initializer=float(hvd.rank()))
        with raising(ValueError, text="session"):
            elastic.TensorFlowState()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            state: Any = elastic.TensorFlowState(epoch=hvd.rank())
            session.run(variable.assign_add(5.0))
            state.restore()
            assert (session.run(variable), state.epoch) == (hvd.rank(), hvd.rank())
            state.sync()
            assert (session.run(variable), state.epoch) == (0.0, 0)


def models_and_optimizers_go_back() -> None:
    rank = hvd.rank()
    model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.5, momentum=0.5), loss="mse")
    state = elastic.TensorFlowKerasState(model, epoch=rank)
    state.sync()
    began = [np.array(v) for v in state.variables]
    assert len(began) == 6  # two weights, their momenta, the step and the rate
    assert hvd.allgather_object([v.tolist() for v in began])[0] == [v.tolist() for v in began]
    model.fit(np.ones([4, 2]), np.full([4, 1], float(rank)), verbose=0)
    assert any((np.array(v) != b).any() for v, b in zip(state.variables, began, strict=True))
    state.restore()
    for variable, value in zip(state.variables, began, strict=True):
        np.testing.assert_array_equal(variable, value)
    with raising(ValueError, text="built"):
        elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    with raising(ValueError, text="optimizer"):
        elastic.TensorFlowKerasState(
            tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
        )


CASES = [
    variables_start_from_rank_0_and_go_back,
    a_session_goes_back,
    models_and_optimizers_go_back,
]
