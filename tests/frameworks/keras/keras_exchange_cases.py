"""Exchanges of hvdtrain.keras on gradients that depend on the rank, against formulas."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from typing import Any

import keras
import numpy as np
from exchange_formulas import OneBitFormula
from keras_optimizer_cases import (
    SHAPES,
    STEPS,
    Array,
    assert_close,
    digest,
    gradients,
    mean_gradients,
    own,
    stepped,
)
from nodes import nodes_of_their_own
from one_bit import OneBit
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.core.arguments import GradientSettings
from hvdtrain.core.arrays import fused
from hvdtrain.core.exchanges.half import round_to_half, widen_half
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.core.process_set import global_process_set
from hvdtrain.types import DType


def rounded(values: Array) -> Array:
    """Return values rounded to bfloat16."""
    single: Any = values.astype(np.float32)
    bits = round_to_half(single, DType.BFLOAT16)
    return np.asarray(widen_half(bits, DType.BFLOAT16))


def half_types_by_name() -> str:
    """As text and as compression, with each rank on a node of its own."""

    def combined(step: int) -> list[Array]:
        if hvd.size() == 1:
            return own(step)
        every = [[rounded(g) for g in gradients(step, rank)] for rank in range(hvd.size())]
        return [rounded(sum(parts) / hvd.size()) for parts in zip(*every, strict=True)]

    make = partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    expected, ends = stepped(make(), combined), []
    for given in ({"exchange": "half:type=bf16"}, {"compression": hvd.Compression.bf16}):
        with nodes_of_their_own():
            ends.append(stepped(hvd.DistributedOptimizer(make(), **given), own))
        assert_close(ends[-1], expected, rtol=1e-6)
    assert digest(ends[0]) == digest(ends[1])
    return digest(ends[0])


def compressed_gradients_by_name() -> str:
    """Forms that lose nothing give the average, and others the same bits on all ranks."""
    make, ends = partial(keras.optimizers.SGD, 0.1), []
    exact = ("powersgd:rank=99,min_rate=0.001", "topk:ratio=1")
    for text in (*exact, "nbit:bits=4,block=8", "powersgd:rank=1,min_rate=0.1", "topk:ratio=0.1"):
        with nodes_of_their_own():
            ends.append(stepped(hvd.DistributedOptimizer(make(), exchange=text), own))
        if text in exact:
            assert_close(ends[-1], stepped(make(), mean_gradients), rtol=1e-3)
    return "".join(digest(end) for end in ends)


def residuals_are_not_in_units_of_the_loss_scale() -> str:
    """The scale doubles after every second step, and the bits are those without a scale."""
    make, ends = partial(keras.optimizers.SGD, 0.1), []
    for text in ("nbit:bits=2,block=8", "powersgd:rank=1,min_rate=0.1", "topk:ratio=0.1"):
        doubling = keras.optimizers.LossScaleOptimizer(make(), 2.0**10, dynamic_growth_steps=2)
        with nodes_of_their_own():
            plain = stepped(hvd.DistributedOptimizer(make(), exchange=text), own)
            optimizer = hvd.DistributedOptimizer(doubling, exchange=text)
            scaled = stepped(optimizer, scaled_gradients)
        assert float(optimizer.dynamic_scale) == 2.0 ** (10 + STEPS // 2)
        assert digest(scaled) == digest(plain), text
        ends += scaled
    return digest(ends)


def scaled_gradients(step: int) -> list[Array]:
    """Return the gradients of this rank, for a scale of 1024 that doubles after two steps."""
    return [gradient * np.float32(2.0 ** (10 + step // 2)) for gradient in own(step)]


def an_exchange_of_gradients() -> str:
    """One bit per element, with feedback; each rank counts as a node."""
    counts = [int(np.prod(shape)) for shape in SHAPES]
    formula = OneBitFormula(range(hvd.size()), counts)
    specs = [
        ParameterSpec(str(number), (count,), (1,), DType.FLOAT32, "float32", "cpu")
        for number, count in enumerate(counts)
    ]
    plan = make_plan(specs, 1 << 20, 1 << 20)

    def combined(step: int) -> list[Array]:
        every = [
            [g.astype(np.float64).reshape(-1) for g in gradients(step, rank)]
            for rank in range(hvd.size())
        ]
        found = formula.step(plan, every, [1.0] * hvd.size())
        return [f.reshape(s).astype(np.float32) for f, s in zip(found, SHAPES, strict=True)]

    make = partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    mine = stepped(hvd.DistributedOptimizer(make(), exchange=OneBit(hierarchical=False)), own)
    assert_close(mine, stepped(make(), combined))
    return digest(mine)


def an_exchange_goes_with_one_list_of_gradients() -> None:
    if hvd.size() == 1 or keras.backend.backend() != "torch":  # others say it from a callback
        return
    exchange = OneBit()
    stepped(hvd.DistributedOptimizer(keras.optimizers.SGD(), exchange=exchange), own)
    other = hvd.DistributedOptimizer(keras.optimizers.SGD(), exchange=exchange)
    with raising(ValueError, text="'onebit' was given 3 gradients before, and now 1 or others"):
        other.apply([keras.ops.zeros([2])], [keras.Variable(np.zeros(2))])
    with raising(ValueError, text="'onebit' was given 3 gradients before, and now 3 or others"):
        stepped(other, own)  # on other variables of the same shapes


class Owner:
    """What stands for a parameter, and holds its exchange."""

    def __init__(self, exchange: OneBit) -> None:
        self.exchange = exchange


def an_exchange_is_released_with_its_last_user() -> None:
    exchange = OneBit(hierarchical=False)
    settings = GradientSettings(exchange=exchange)
    fused.reduce_fused([np.ones(3, np.float32)], [Owner(exchange)], "released", settings)
    kept = weakref.ref(exchange)
    del exchange, settings
    # Other plans take the place of the one that has used it.
    fused._cache_of(global_process_set.channel()).plans.clear()
    deadline = time.monotonic() + 120.0  # other threads may still look at what they have done
    while kept() is not None:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.001)


CASES = [
    half_types_by_name,
    compressed_gradients_by_name,
    residuals_are_not_in_units_of_the_loss_scale,
    an_exchange_of_gradients,
    an_exchange_is_released_with_its_last_user,
    an_exchange_goes_with_one_list_of_gradients,
]
