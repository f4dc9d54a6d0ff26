"""hvdtrain.tensorflow in new worlds, on other engines; these cases come last."""

import os
from collections.abc import Mapping
from functools import partial
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow_ops_cases import expected, input_of
from tensorflow_training_cases import OPTIMIZERS, assert_close, digest, of_one_rank, train

import hvdtrain.tensorflow as hvd
from hvdtrain.core import context


def restart(engine: str | None = None, settings: Mapping[str, str] | None = None) -> None:
    hvd.shutdown()
    # Without a size of buckets the world would measure one.
    with mock.patch.dict(os.environ, {"HVDTRAIN_BUCKET_BYTES": "1000000", **(settings or {})}):
        hvd.init(engine=engine)


def _check_small_numbers() -> None:
    """Those below the smallest normal one count, though TensorFlow's threads flush them to zero."""
    rank, size = hvd.rank(), hvd.size()
    tiny = tf.constant(np.array([1000 * (rank + 1)], np.int32).view(np.float32))
    reduce = partial(hvd.allreduce, op=hvd.Sum, name="tiny")
    total = (tf.function(reduce, autograph=False) if rank == 0 else reduce)(tiny)
    assert total.numpy().view(np.int32)[0] == 1000 * size * (size + 1) // 2


def engines_give_what_one_rank_gives() -> str:
    ends = []
    want = of_one_rank(OPTIMIZERS[1])
    engines = [("mpi", {"HVDTRAIN_SHARED_MEMORY": "0"}), ("gloo", {})]
    for engine, settings in engines[: 2 if hvd.size() == 2 else 1]:  # gloo imports torch, for long
        restart(engine, settings)
        assert context.current().engine_name == engine
        end = train(OPTIMIZERS[1](), hvd.rank(), hvd.DistributedGradientTape)
        assert_close(end, want)
        ends.append(digest(end))
        x = tf.constant(input_of(hvd.rank()))
        reduce = tf.function(lambda x: hvd.allreduce(x, op=hvd.Max), autograph=False)
        np.testing.assert_array_equal(reduce(x), expected(hvd.Max))
        assert reduce.experimental_get_tracing_count() == 1
        rows = hvd.allgather(x[: 1 + hvd.rank() % 2])
        np.testing.assert_array_equal(rows[-1 - (hvd.size() - 1) % 2], input_of(hvd.size() - 1)[0])
        np.testing.assert_array_equal(hvd.broadcast(x, 1), input_of(1))
        _check_small_numbers()
    return "-".join(ends)
