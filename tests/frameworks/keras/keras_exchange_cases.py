"""Exchanges of hvdtrain.keras on gradients that depend on the rank, against formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from exchange_formulas import BlockFormula, DiLoCoFormula, OfRanks, OneBitFormula, mean
from keras_optimizer_cases import (
    SHAPES,
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
from hvdtrain.core.compression.half_types import round_to_half, widen_half
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
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


def local_steps(combine: Callable[[OfRanks, int], list[Any]]) -> list[Any]:
    """Return weights after five local steps of SGD, of which each second one ends an exchange.

    Args:
        combine: returns the weights to go on from, given those of all ranks and their number of
            steps since the last time: 2, or 1 in the flush at the end.
    """
    random = np.random.default_rng(0)
    start: list[Any] = [random.normal(size=s).astype(np.float32).astype(float) for s in SHAPES]
    ranks = [list(start) for _ in range(hvd.size())]
    for step in range(5):
        for rank, weights in enumerate(ranks):
            moved = zip(weights, gradients(step, rank), strict=True)
            ranks[rank] = [w - 0.1 * g for w, g in moved]
        if step % 2 or step == 4:
            together = combine(ranks, 1 if step == 4 else 2)
            ranks = [list(together) for _ in ranks]
    return ranks[0]


def weights_after_local_steps() -> str:
    random = np.random.default_rng(0)
    start: list[Any] = [random.normal(size=s).astype(np.float32).astype(float) for s in SHAPES]
    ones = [1.0] * hvd.size()
    block = BlockFormula(list(start), hvd.size(), 0.5, 0.75, nesterov=True)
    outer = DiLoCoFormula(list(start), 0.7, 0.9)

    def blocks(ranks: OfRanks, steps: int) -> list[Any]:
        found = block.block(ranks, ones, steps / 2, flush=steps == 1)
        return block.model if steps == 1 else found

    def outer_steps(ranks: OfRanks, steps: int) -> list[Any]:
        return [outer.round(index, average) for index, average in enumerate(mean(ranks, ones))]

    ends = []
    for text, combine in (
        ("local:steps=2", lambda ranks, _: mean(ranks, ones)),
        ("blockmomentum:steps=2,momentum=0.5,rate=0.75,reset=false", blocks),
        ("diloco:steps=2", outer_steps),
    ):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=text)
        variables = stepped(optimizer, own, 5)
        assert not optimizer.synchronized
        with raising(RuntimeError, text="call flush"):
            optimizer.exchange_state()
        optimizer.flush()
        assert optimizer.synchronized
        saved = optimizer.exchange_state()
        assert saved["steps"] == 5
        assert_close(variables, local_steps(combine), rtol=1e-5)
        ends += variables
    return digest(ends)


def fragments_begin_with_the_last_average_of_a_warm_up() -> str:
    """One step is averaged, and of the change in the next one half is kept."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        exchange="diloco:steps=2,fragments=2,rate=0.5,momentum=0,warmup=1",
    )
    variables = stepped(optimizer, own, 2)
    optimizer.flush()
    half = stepped(
        keras.optimizers.SGD(0.1), lambda step: [g * 0.5**step for g in mean_gradients(step)], 2
    )
    assert_close(variables, half, rtol=1e-5)
    return digest(variables)


class Weights(keras.callbacks.Callback):
    """Notes the weights before each validation and at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[str] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.digests.append(digest(self.model.trainable_variables))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.digests.append(digest(self.model.trainable_variables))


def fit_shows_equal_weights_in_validation() -> str:
    """Ranks take different numbers of steps, an odd number on rank 0."""
    random = np.random.default_rng(hvd.rank())
    count = 4 * (3 + hvd.rank())
    x, y = random.normal(size=(count, 3)), random.normal(size=(count, 1))
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange="local:steps=2")
    model.compile(optimizer, loss="mse")
    seen = Weights()
    for _ in range(2):
        model.fit(
            *(x, y), batch_size=4, verbose=0, epochs=2, callbacks=[seen], validation_data=(x, y)
        )
    assert len(seen.digests) == 8
    assert model.optimizer.synchronized
    return " ".join(seen.digests)


def what_does_not_go_with_weights_is_refused() -> None:
    def refused(exchange: str, inner: Any, text: str) -> None:
        with raising(ValueError, text=text):
            hvd.DistributedOptimizer(inner, exchange=exchange)

    sgd = keras.optimizers.SGD
    refused("local:steps=2", keras.optimizers.LossScaleOptimizer(sgd()), "a LossScaleOptimizer")
    refused("local:steps=2", sgd(gradient_accumulation_steps=2), "accumulation of gradients")
    refused("local:steps=2,state=reset", sgd(), "resetting the optimizer's state")
    refused("blockmomentum:block=8,reset=false", sgd(), "counting samples")
    refused("postlocal:after=5,steps=2", sgd(), "averaging gradients at first")
    with raising(ValueError, text="accumulation of gradients"):
        hvd.DistributedOptimizer(sgd(), exchange="local:steps=2", backward_passes_per_step=2)


CASES = [
    weights_after_local_steps,
    fragments_begin_with_the_last_average_of_a_warm_up,
    fit_shows_equal_weights_in_validation,
    what_does_not_go_with_weights_is_refused,
    half_types_by_name,
    compressed_gradients_by_name,
    an_exchange_of_gradients,
    an_exchange_goes_with_one_list_of_gradients,
]
