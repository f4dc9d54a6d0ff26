"""hvdtrain.tensorflow in graphs and sessions of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_training_cases import STEPS, assert_close, batch, digest, initial, loss_of, train

import hvdtrain.tensorflow as hvd

v1 = tf.compat.v1


@contextmanager
def graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield


def session(threads: int = 1) -> Any:
    """Return a session with so many threads for operations, all of which may be held up."""
    config = v1.ConfigProto(
        inter_op_parallelism_threads=threads,
        intra_op_parallelism_threads=1,
        use_per_session_threads=True,
    )
    return v1.Session(config=config)


def operations_do_not_hold_one_another_up() -> None:
    """Each rank fetches the same operations in another order."""
    rank, size = hvd.rank(), hvd.size()
    for threads in (1, 2):
        with graph():
            fed = v1.placeholder(tf.float32, [], name="fed")
            variable = v1.get_variable("v", initializer=2.0)
            parts = [v1.random_uniform([3]) * 0.0 + number for number in range(6)]
            outputs = [hvd.allreduce(part + variable, op=hvd.Sum) for part in parts]
            outputs += [hvd.allreduce(fed * number, op=hvd.Sum) for number in range(1, 4)]
            unfed = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
            start = hvd.broadcast_global_variables(0)
            order = np.random.default_rng(rank).permutation(len(outputs))
            with session(threads) as running:
                running.run(v1.global_variables_initializer())
                running.run(start)  # needs no feed, whatever was made before
                assert running.run(unfed) == size
                for _ in range(5):
                    got = running.run([outputs[i] for i in order], {fed: 1.0})
                    for i, value in zip(order, got, strict=True):
                        want = (i + 2) * size if i < 6 else (i - 5) * size
                        np.testing.assert_allclose(value, np.full(np.shape(value), want))


def optimizers_give_what_one_rank_gives() -> str:
    ends, rank = [], hvd.rank()
    want = train(tf.keras.optimizers.SGD(0.1), None)
    batches = [[tensor.numpy() for tensor in batch(step, rank)] for step in range(STEPS)]
    for passes in (1, 2):
        with graph():
            x, y = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.float32, [None, 2])
            begin = enumerate(initial(seed=5 + rank))
            variables = [v1.get_variable(f"w{number}", initializer=w) for number, w in begin]
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(0.1),
                backward_passes_per_step=passes,
                average_aggregated_gradients=True,
            )
            step = v1.train.get_or_create_global_step()
            update = optimizer.minimize(loss_of(variables, x, y), global_step=step)
            hook = hvd.BroadcastGlobalVariablesHook(0)
            with v1.train.MonitoredTrainingSession(hooks=[hook]) as running:
                for number in range(STEPS * passes):
                    inputs, targets = batches[number // passes]
                    running.run(update, {x: inputs, y: targets})
                ends.append(running.run(variables))
                assert running.run(step) == STEPS * passes
        assert_close(ends[-1], want)
    return "-".join(map(digest, ends))


def steps_are_combined_by_adasum() -> str:
    """Ranks whose steps are orthogonal add them, those with equal ones average them."""
    rank, size = hvd.rank(), hvd.size()
    with graph():
        slope = tf.one_hot(rank, size)
        apart, alike = v1.get_variable("a", [size]), v1.get_variable("b", [2])
        loss = tf.reduce_sum(apart * slope) + tf.reduce_sum(alike)
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
        update = optimizer.minimize(loss)
        with session(2) as running:
            running.run(v1.global_variables_initializer())
            running.run(hvd.broadcast_global_variables(0))
            before = running.run([apart, alike])
            running.run(update)
            after = running.run([apart, alike])
    for start, end in zip(before, after, strict=True):
        np.testing.assert_allclose(end, start - 0.5, rtol=1e-5, atol=1e-6)
    return digest(after)


CASES = [
    operations_do_not_hold_one_another_up,
    optimizers_give_what_one_rank_gives,
    steps_are_combined_by_adasum,
]
