"""hvdtrain.tensorflow in graphs and sessions of TensorFlow 1."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_training_cases as training

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


def two_optimizers_step_in_one_run() -> str:
    """Both reduce for the first time, of equal shapes, and each rank fetches another one first."""
    rank, size = hvd.rank(), hvd.size()
    ends = []
    for threads, passes in ((1, 1), (4, 2)):
        with graph():
            variables, updates = [], []
            for number in (1.0, 2.0):
                weight = v1.get_variable(f"w{threads}{passes}{number}", initializer=tf.zeros([99]))
                optimizer = hvd.DistributedOptimizer(
                    v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=passes
                )
                loss = tf.reduce_sum(weight) * (rank + number)
                updates.append(optimizer.minimize(loss, var_list=[weight]))
                variables.append(weight)
            with session(threads) as running:
                running.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for _ in range(3 * passes):
                    running.run(updates[:: 1 - 2 * (rank % 2)])
                ends += running.run(variables)
        for number, end in zip((1.0, 2.0), ends[-2:], strict=True):
            want = -3.0 * passes * (number + (size - 1) / 2)
            np.testing.assert_allclose(end, np.full(99, want), rtol=1e-6)
    return training.digest(ends)


def gradients_evaluated_alone() -> None:
    """All ranks run what one of them needs for its gradient, whatever TensorFlow leaves out."""
    rank, size = hvd.rank(), hvd.size()
    rest = hvd.add_process_set(list(range(1, size)))
    for process_set in [hvd.global_process_set, *([rest] if rank else [])]:
        count = process_set.size()
        assert count is not None
        for operation, want in operations_on(process_set, count):
            _alone_in_a_session(operation, count, want)
            _alone_in_a_function(operation, count, want)
    hvd.remove_process_set(rest)


def operations_on(process_set: Any, count: int) -> list[tuple[Callable[[Any], Any], Any]]:
    rank, on = hvd.rank(), {"process_set": process_set}
    numbers = [float(r + 1) for r in process_set.ranks]
    mine, mean = np.array(numbers)[:, None], np.mean(numbers)

    def slices(x: Any) -> Any:
        rows = tf.IndexedSlices(x, tf.range(tf.shape(x)[0]), tf.shape(x, tf.int64))
        return hvd.allreduce(rows, **on).values

    def broadcast(root: int) -> tuple[Callable[[Any], Any], Any]:
        return lambda x: hvd.broadcast(x, root, **on), mean if rank == root else 0.0

    return [
        (lambda x: hvd.allreduce(x, prescale_factor=2.0, **on), 2 * mean),
        (lambda x: hvd.allreduce(x, op=hvd.Sum, **on), count * mean),
        (lambda x: hvd.grouped_allreduce([x, x], **on)[1], mean),
        (slices, mean),
        (lambda x: hvd.allgather(x, **on), mean),
        (lambda x: hvd.grouped_allgather([x[:rank], x], **on)[1], mean),
        (lambda x: hvd.alltoall(x, **on), mine),
        (lambda x: hvd.alltoall(x, tf.ones([count], tf.int32), **on)[0], mine),
        (lambda x: hvd.reducescatter(x, prescale_factor=2.0, **on), 2 * mine),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum, **on), count * mine),
        (lambda x: hvd.grouped_reducescatter([x, x], **on)[0], mine),
        *map(broadcast, process_set.ranks),
    ]


def _alone_in_a_session(operation: Callable[[Any], Any], rows: int, want: Any) -> None:
    with graph(), session() as running:
        x = v1.get_variable("x", initializer=tf.ones([rows, 2]))
        y = operation(x)
        (gradient,) = tf.gradients(y, x, tf.ones_like(y) * (hvd.rank() + 1.0))
        running.run(v1.global_variables_initializer())
        np.testing.assert_allclose(running.run(gradient), np.broadcast_to(want, [rows, 2]), 1e-6)


def _alone_in_a_function(operation: Callable[[Any], Any], rows: int, want: Any) -> None:
    """The gradient is a function of TensorFlow's making, in which only what it needs runs."""
    x = tf.ones([rows, 2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(operation, autograph=False)(x)
    gradient = tape.gradient(y, x, tf.ones_like(y) * (hvd.rank() + 1.0))
    np.testing.assert_allclose(gradient, np.broadcast_to(want, [rows, 2]), 1e-6)


def optimizers_give_what_one_rank_gives() -> str:
    ends, rank = [], hvd.rank()
    want = training.of_one_rank(training.OPTIMIZERS[0])
    batches = [
        [tensor.numpy() for tensor in training.batch(step, rank)] for step in range(training.STEPS)
    ]
    for passes in (1, 2):
        with graph():
            x, y = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.float32, [None, 2])
            begin = enumerate(training.initial(seed=5 + rank))
            variables = [v1.get_variable(f"w{number}", initializer=w) for number, w in begin]
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(0.1),
                backward_passes_per_step=passes,
                average_aggregated_gradients=True,
            )
            step = v1.train.get_or_create_global_step()
            update = optimizer.minimize(training.loss_of(variables, x, y), global_step=step)
            hook = hvd.BroadcastGlobalVariablesHook(0)
            with v1.train.MonitoredTrainingSession(hooks=[hook]) as running:
                for number in range(training.STEPS * passes):
                    inputs, targets = batches[number // passes]
                    running.run(update, {x: inputs, y: targets})
                ends.append(running.run(variables))
                assert running.run(step) == training.STEPS * passes
        training.assert_close(ends[-1], want)
    return "-".join(map(training.digest, ends))


def gradients_are_sparse_on_some_ranks() -> None:
    with graph():
        table = v1.get_variable("table", initializer=tf.zeros([training.ROWS_OF_TABLE, 2]))
        kinds = ["dense", *["sparse"] * (hvd.size() - 1)]
        loss = training.part_of_loss(kinds[hvd.rank()], table, hvd.rank())
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        update = optimizer.minimize(loss, var_list=[table])
        with session() as running:
            running.run(v1.global_variables_initializer())
            for _ in range(2):
                running.run(update)
            np.testing.assert_allclose(
                running.run(table), -2 * training.mean_gradient(kinds), rtol=1e-6
            )


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
    return training.digest(after)
