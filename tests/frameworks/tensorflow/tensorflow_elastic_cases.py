"""horovod.tensorflow.elastic on ranks that stay."""

from typing import Any

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
