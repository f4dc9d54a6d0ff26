"""Exchanges of hvdtrain.keras on gradients that depend on the rank, against formulas."""

import importlib
from functools import partial
from typing import Any

import keras
import keras_optimizer_cases as cases
import numpy as np
from nodes import nodes_of_their_own
from one_bit import OneBit
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.core.exchanges.half import round_to_half, widen_half
from hvdtrain.types import DType


def rounded(values: cases.Array) -> cases.Array:
    single: Any = values.astype(np.float32)
    return np.asarray(widen_half(round_to_half(single, DType.BFLOAT16), DType.BFLOAT16))


def a_rank_begins_without_dense_gradients() -> None:
    """In the first step of the process with an exchange that sums nodes first, on TensorFlow."""
    tf = importlib.import_module("tensorflow")
    rank, size = hvd.rank(), hvd.size()
    table = keras.Variable(np.zeros((4, 2)))
    gradient = tf.fill([4, 2], tf.constant(2.0, table.value.dtype))
    if rank:
        gradient = tf.IndexedSlices(gradient[:1], tf.constant([rank]), tf.constant([4, 2]))
    with nodes_of_their_own():
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), exchange="half:type=bf16")
        optimizer.apply([gradient], [table])
    rows = [[2.0 + 2.0 * (0 < row < size)] * 2 for row in range(4)]
    cases.assert_close([table.numpy()], [-np.array(rows) / size], rtol=2.0**-7)


def half_types_by_name() -> str:
    """As text and as compression, with each rank on a node of its own."""

    def combined(step: int) -> list[cases.Array]:
        if hvd.size() == 1:
            return cases.own(step)
        every = [[rounded(g) for g in cases.gradients(step, rank)] for rank in range(hvd.size())]
        return [rounded(sum(parts) / hvd.size()) for parts in zip(*every, strict=True)]

    make = partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    expected, ends = cases.stepped(make(), combined), []
    for given in ({"exchange": "half:type=bf16"}, {"compression": hvd.Compression.bf16}):
        with nodes_of_their_own():
            ends.append(cases.stepped(hvd.DistributedOptimizer(make(), **given), cases.own))
        cases.assert_close(ends[-1], expected, rtol=1e-6)
    assert cases.digest(ends[0]) == cases.digest(ends[1])
    return cases.digest(ends[0])


def residuals_are_not_in_units_of_the_loss_scale() -> str:
    """The scale doubles after every second step, and the bits are those without a scale."""
    make, ends = partial(keras.optimizers.SGD, 0.1), []
    for text in ("nbit:bits=2,block=8", "powersgd:rank=1,min_rate=0.1", "topk:ratio=0.1"):
        doubling = keras.optimizers.LossScaleOptimizer(make(), 2.0**10, dynamic_growth_steps=2)
        with nodes_of_their_own():
            plain = cases.stepped(hvd.DistributedOptimizer(make(), exchange=text), cases.own)
            optimizer = hvd.DistributedOptimizer(doubling, exchange=text)
            scaled = cases.stepped(optimizer, scaled_gradients)
        assert float(optimizer.dynamic_scale) == 2.0 ** (10 + cases.STEPS // 2)
        assert cases.digest(scaled) == cases.digest(plain), text
        ends += scaled
    return cases.digest(ends)


def scaled_gradients(step: int) -> list[cases.Array]:
    """Return the gradients of this rank, for a scale of 1024 that doubles after two steps."""
    return [gradient * np.float32(2.0 ** (10 + step // 2)) for gradient in cases.own(step)]


def an_exchange_goes_with_one_list_of_gradients() -> None:
    if hvd.size() == 1 or keras.backend.backend() != "torch":  # others say it from a callback
        return
    exchange = OneBit()
    cases.stepped(hvd.DistributedOptimizer(keras.optimizers.SGD(), exchange=exchange), cases.own)
    other = hvd.DistributedOptimizer(keras.optimizers.SGD(), exchange=exchange)
    with raising(ValueError, text="'onebit' got 3 gradients before, and 1 or different ones now"):
        other.apply([keras.ops.zeros([2])], [keras.Variable(np.zeros(2))])
    with raising(ValueError, text="'onebit' got 3 gradients before, and 3 or different ones now"):
        cases.stepped(other, cases.own)  # on other variables of the same shapes
