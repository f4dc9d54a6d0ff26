"""Loops with tapes and optimizers of TensorFlow, as Horovod's elastic example for it has them."""

from collections.abc import Callable
from typing import Any

import elastic_keras_worker as common
import keras
import tensorflow as tf

import hvdtrain.tensorflow as hvd

Taken = Callable[[Any, Any, Any], None]


def function_with_a_tape(model: Any) -> tuple[Any, Taken]:
    """Step in a tf.function that is traced once, with sparse and local gradients, too."""
    optimizer = keras.optimizers.SGD(0.01, momentum=0.5)

    table, own = tf.Variable(tf.ones([4, 1])), tf.Variable(1.0)

    @tf.function
    def step(x: Any, y: Any, stop: Any) -> None:
        tf.numpy_function(lambda: stop() or 0, [], tf.int64, stateful=True)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            loss += tf.reduce_sum(tf.gather(table, [1, 3])) + own
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(own)
        *gradients, sparse, local = tape.gradient(loss, [*model.trainable_variables, table, own])
        tf.debugging.assert_near(tf.convert_to_tensor(sparse)[:, 0], [0.0, 1.0, 0.0, 1.0])
        tf.debugging.assert_near(local * tf.cast(hvd.size_op(), tf.float32), 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return optimizer, step


def eager_with_an_optimizer(model: Any) -> tuple[Any, Taken]:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5))

    def step(x: Any, y: Any, stop: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        stop()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return optimizer, step


def looping(
    make: Callable[[Any], tuple[Any, Taken]], kill: common.Kill
) -> tuple[Any, dict[str, Any]]:
    model = common.model_of(hvd.rank())
    optimizer, step = make(model)
    state: Any = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0)
    seen: list[Any] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    def stop() -> None:
        kill(state.epoch, state.batch)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < common.EPOCHS:
            for x, y in common.batches(state.epoch)[state.batch :]:
                seen.append((state.epoch, state.batch))
                step(tf.constant(x), tf.constant(y), stop)
                state.batch += 1
                state.commit()
            state.epoch, state.batch = state.epoch + 1, 0

    train(state)
    return model, {"seen": seen, "resets": resets}


def _case(make: Callable[[Any], tuple[Any, Taken]]) -> Callable[[common.Kill], Any]:
    return lambda kill: looping(make, kill)


CASES = {"function": _case(function_with_a_tape), "eager": _case(eager_with_an_optimizer)}
