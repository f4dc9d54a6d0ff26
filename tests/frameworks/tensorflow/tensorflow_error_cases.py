"""Process sets, and what ranks are told that call an operation in a wrong way."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from raising import raising
from tensorflow_ops_cases import both_modes

import hvdtrain.tensorflow as hvd
from hvdtrain.core import context
from hvdtrain.errors import MismatchError, UnsupportedError


def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    rest = hvd.add_process_set(list(range(1, size)))
    number = rest.process_set_id
    assert number is not None
    assert int(hvd.process_set_included_op(number)) == (rank > 0)
    assert int(hvd.process_set_included_op(77)) == -2
    assert int(hvd.size_op(number)) == size - 1
    if rank:
        for mode in both_modes(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=rest)):
            np.testing.assert_allclose(mode(tf.constant([float(rank)])), [size * (size - 1) / 2])
        assert hvd.broadcast(rank, size - 1, process_set=rest).numpy() == size - 1
    w = tf.Variable([1.0])
    with hvd.DistributedGradientTape(tf.GradientTape(), process_set=rest) as tape:
        loss = w * float(rank)
    mean = size / 2  # of 1 .. size - 1
    assert float(tape.gradient(loss, w)[0]) == (mean if rank else 0.0)
    gc.collect()
    kept = context.current().kept
    before = len(kept)
    assert hvd.remove_process_set(rest)
    left = before - (rank > 0 and size > 2)  # without what gradients of the set have left
    deadline = time.monotonic() + 120.0  # the thread of the set's channel ends in its own time
    while len(kept) != left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert len(kept) == left


def run_in_graph(function: Callable[[], Any], of_session: bool) -> None:
    if not of_session:
        tf.function(function, autograph=False)()
        return
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(function())


def bad_input() -> None:
    rank, size = hvd.rank(), hvd.size()
    wrong = tf.ones([3 if rank else 2])
    failed = tf.errors.FailedPreconditionError
    with raising(MismatchError, hvd.HorovodInternalError, failed, text="rank 0 sent"):
        hvd.allreduce(wrong, name="wrong shape")
    with raising(MismatchError, failed, text="root_rank"):
        hvd.broadcast(tf.ones([2]), min(rank, 1), name="wrong root")
    with raising(tf.errors.UnknownError, text="rank 0 sent allreduce 'wrong'"):
        tf.function(lambda: hvd.allreduce(wrong, name="wrong"), autograph=False)()
    invalid = tf.errors.InvalidArgumentError
    with raising(ValueError, invalid, text=f"root_rank {size}"):
        hvd.broadcast(tf.ones([2]), size)
    with raising(ValueError, invalid, text="is not divisible"):
        hvd.alltoall(tf.ones([size + 1]))
    with raising(ValueError, invalid, text="scalar"):
        hvd.reducescatter(1.0)
    # In graphs TensorFlow has no other classes for what Python raises.
    for of_session in (False, True):
        with raising(invalid, text="is not divisible"):
            run_in_graph(lambda: hvd.alltoall(tf.ones([size + 1])), of_session)
        with raising(invalid, text="scalar"):
            run_in_graph(lambda: hvd.reducescatter(tf.constant(1.0)), of_session)
        with raising(tf.errors.UnknownError, text="rank 0 sent allreduce"):
            run_in_graph(lambda: hvd.allreduce(tf.zeros([2 + rank]), name="sizes"), of_session)
    with raising(UnsupportedError, text="jit_compile=False"):
        tf.function(lambda: hvd.allreduce(tf.ones([2])), jit_compile=True, autograph=False)()
    with raising(MismatchError, text="Build the same model"):
        hvd.broadcast_variables([tf.Variable(wrong)], 0)
    with raising(RuntimeError, text="eager"):
        hvd.broadcast_global_variables(0)
