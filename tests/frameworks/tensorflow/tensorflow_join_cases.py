"""Ranks that join, before the others have reduced anything and later, and steps that end early."""

from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from raising import raising
from tensorflow_ops_cases import both_modes

import hvdtrain.tensorflow as hvd


def first_steps_after_a_join() -> None:
    """Where a rank has joined, the others settle nothing that is for the whole run."""
    rank, size = hvd.rank(), hvd.size()
    w = tf.Variable([1.0, 2.0, 3.0])

    def step(w: tf.Variable) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w)
        return hvd.DistributedGradientTape(tape).gradient(loss, w)

    for mode in both_modes(step):
        for number in range(2 * rank):  # rank 0 has none
            there = sum(1 for r in range(size) if number < 2 * r)
            np.testing.assert_allclose(mode(w), [there / size] * 3, rtol=1e-6)
        assert int(hvd.join()) == size - 1
    for mode in both_modes(step):
        np.testing.assert_allclose(mode(w), [1.0] * 3)


def joined_ranks_give_zeros() -> None:
    rank, size = hvd.rank(), hvd.size()
    w = tf.Variable([[2.0]])
    for step in range(rank + 1):  # the last rank has most
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [w])
        assert float(gradient[0, 0]) == np.float32((size - step) / size)
    assert int(hvd.join()) == size - 1

    # Gradients of shapes that some ranks have not reduced yet, and wrapped while they are recorded.
    v = tf.Variable(tf.ones([7]))
    for steps in (rank, 2):
        for _ in range(steps):
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(v)
                outer = hvd.DistributedGradientTape(inner)
            (gradient,) = outer.gradient(loss, [v])
            assert gradient.shape == [7]
        assert int(hvd.join()) in range(size)


def interrupted_steps_end() -> None:
    """Ctrl-C while gradients are copied: no thread of ours waits for the others for ever."""
    rank, size = hvd.rank(), hvd.size()
    w = tf.Variable([1.0, 2.0, 3.0])

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w) * float(rank + 1)
        return hvd.DistributedGradientTape(tape).gradient(loss, [w])[0]

    def interrupted(*_: Any, **how: Any) -> None:
        raise KeyboardInterrupt

    with mock.patch("numpy.copyto", interrupted), raising(KeyboardInterrupt):
        gradient()
    hvd.barrier()  # comes after the step that was given up
    np.testing.assert_allclose(gradient(), [(size + 1) / 2] * 3)
