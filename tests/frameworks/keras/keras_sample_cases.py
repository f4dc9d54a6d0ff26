"""Samples that hvdtrain.keras counts, in loops of one's own and in fit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from exchange_formulas import BlockFormula, OfRanks, mean
from keras_formula import Simulated
from keras_optimizer_cases import SHAPES, assert_close, digest, gradients, own, stepped
from keras_weight_cases import fit_line, line_batches, line_model, local_steps
from raising import raising

import hvdtrain.keras as hvd


def gradients_count_by_samples() -> str:
    """Also in a function that is traced once for all numbers of samples."""

    def samples(step: int, rank: int) -> int:
        return 1 + rank + step * (1 - rank % 2)

    def combined(step: int) -> list[Any]:
        ranks = range(hvd.size())
        counts = [float(samples(step, rank)) for rank in ranks]
        return [g.astype("f4") for g in mean([gradients(step, rank) for rank in ranks], counts)]

    def counted(step: int) -> list[Any]:
        optimizer.sample_weight = samples(step, hvd.rank())
        return own(step)

    expected = stepped(keras.optimizers.SGD(0.1), combined)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if keras.backend.backend() == "jax":
        variables = traced_by_jax(optimizer, samples)
        assert_close(variables, expected)
        return digest(variables)
    ends = stepped(optimizer, counted)
    assert_close(ends, expected)
    if keras.backend.backend() != "tensorflow":
        return digest(ends)
    tf = importlib.import_module("tensorflow")
    optimizer, variables = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), start()

    @tf.function(reduce_retracing=True)
    def step_on(batch: Any, *gradients: Any) -> None:
        optimizer.sample_weight = keras.ops.shape(batch)[0]
        optimizer.apply(gradients, variables)

    for step in range(4):
        step_on(tf.zeros([samples(step, hvd.rank())]), *map(tf.constant, own(step)))
    assert_close(variables, expected)
    return digest(variables)


def traced_by_jax(optimizer: Any, samples: Callable[[int, int], int]) -> list[Any]:
    """Return variables after four steps of one traced function, which counts these samples."""
    import jax

    variables = start()
    optimizer.build(variables)

    @jax.jit
    def step_on(count: Any, state: Any, gradients: Any, values: Any) -> Any:
        optimizer.sample_weight = count
        return optimizer.stateless_apply(state, gradients, values)

    values, state = ([v.value for v in each] for each in (variables, optimizer.variables))
    for step in range(4):
        values, state = step_on(samples(step, hvd.rank()), state, own(step), values)
    return list(values)


def start() -> list[Any]:
    """Return the variables with which `stepped` starts."""
    random = np.random.default_rng(0)
    return [keras.Variable(random.normal(size=shape).astype(np.float32)) for shape in SHAPES]


def blocks_of_samples_in_a_loop_of_ones_own() -> str:
    """Rank r has r + 1 samples in each step, and two steps have as many as a block."""
    counts = [float(rank + 1) for rank in range(hvd.size())]
    random = np.random.default_rng(0)
    start: list[Any] = [random.normal(size=s).astype(np.float32).astype(float) for s in SHAPES]
    block = BlockFormula(list(start), hvd.size(), 0.5, 0.75, nesterov=True)

    def blocks(ranks: OfRanks, steps: int) -> list[Any]:
        found = block.block(ranks, counts, steps / 2, flush=steps == 1)
        return block.model if steps == 1 else found

    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        exchange=f"blockmomentum:block={int(2 * sum(counts))},momentum=0.5,rate=0.75",
    )
    with raising(ValueError, text="sample_weight must be a finite number"):
        optimizer.sample_weight = -1.0
    optimizer.sample_weight = hvd.rank() + 1
    variables = stepped(optimizer, own, 5)
    optimizer.flush()
    assert_close(variables, local_steps(blocks), rtol=1e-5)
    summed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    with raising(ValueError, text="sample_weight needs op=Average"):
        summed.sample_weight = 1
    return digest(variables)


def fit_counts_samples() -> str:
    """The last batch is smaller, so that a block has two steps at first, and then three."""
    batches, ends = line_batches([4] * hvd.size()), []
    block, warm_up = 8 * hvd.size(), 10 * hvd.size()
    rate = f"momentum=0,rate={1 / hvd.size()!r}"
    for text, simulated in (
        (f"blockmomentum:block={block},{rate}", Simulated(batches, 0, block=block)),
        (f"local:steps=2,distributed_after={warm_up}", Simulated(batches, 3, 2)),
    ):
        model = line_model(text)
        for _ in range(2):
            simulated.epoch()
        fit_line(model, batches, epochs=2)
        kernel, bias = simulated.weights[0]
        assert_close(model.weights, [kernel.reshape(3, 1), bias], rtol=1e-5)
        ends += model.weights
    return digest(ends)


CASES = [
    gradients_count_by_samples,
    blocks_of_samples_in_a_loop_of_ones_own,
    fit_counts_samples,
]
