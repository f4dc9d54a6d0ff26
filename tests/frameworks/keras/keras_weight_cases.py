"""Exchanges of weights after local steps in hvdtrain.keras, against formulas for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from exchange_formulas import BlockFormula, DiLoCoFormula, OfRanks, mean
from keras_formula import Batch, Simulated
from keras_optimizer_cases import (
    SHAPES,
    assert_close,
    digest,
    gradients,
    mean_gradients,
    own,
    stateless,
    stepped,
)
from raising import raising

import hvdtrain.keras as hvd


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
        ("blockmomentum:steps=2,momentum=0.5,rate=0.75", blocks),
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


def gradients_are_averaged_before_weights() -> str:
    """Four steps on the mean gradient, until a number or the first lower rate; then two alone."""
    random = np.random.default_rng(0)
    model: list[Any] = [random.normal(size=s).astype(np.float32).astype(float) for s in SHAPES]
    rates = [0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]
    for step in range(4):
        moved = zip(model, mean_gradients(step), strict=True)
        model = [w - rates[step] * g for w, g in moved]
    ranks = [model for _ in range(hvd.size())]
    for step in range(4, 7):
        for rank, weights in enumerate(ranks):
            moved = zip(weights, gradients(step, rank), strict=True)
            ranks[rank] = [w - rates[step] * g for w, g in moved]
        if step >= 5:
            ranks = [mean(ranks, [1.0] * hvd.size())] * hvd.size()
    ends = []
    for after in ("4", "rate"):
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.2, 0.1])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate), exchange=f"postlocal:after={after},steps=2"
        )
        assert not optimizer.exchanges_weights
        optimizer.flush()  # of nothing
        variables = stepped(optimizer, own, 7)
        assert optimizer.exchanges_weights
        optimizer.flush()
        assert optimizer.exchange_state()["steps"] == 7
        assert_close(variables, ranks[0], rtol=1e-5)
        ends += variables
    return digest(ends)


def line_model(exchange: str) -> Any:
    """Return the model of Simulated with a plain SGD."""
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
    model.compile(optimizer, loss="mse")
    return model


def line_batches(counts: list[int]) -> list[list[Batch]]:
    """Return as many batches for each rank, of which the last one is smaller."""
    random = np.random.default_rng(7)
    return [
        [
            (random.normal(size=(rows, 3)), random.normal(size=(rows, 1)))
            for rows in [4] * (count - 1) + [3]
        ]
        for count in counts
    ]


def fit_line(model: Any, batches: list[list[Batch]], **how: Any) -> None:
    """Fit to the batches of this rank."""
    x, y = (np.concatenate(arrays) for arrays in zip(*batches[hvd.rank()], strict=True))
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **how)


def fit_averages_gradients_before_weights() -> str:
    """Rank 0 has most batches: the switch waits for a step in which all ranks have one."""
    batches, ends = line_batches([5, 4, 3][: hvd.size()]), []
    for after in (3, 5):
        simulated = Simulated(batches, after, 2)
        model = line_model(f"postlocal:after={after},steps=2")
        for _ in range(2):
            simulated.epoch()
        fit_line(model, batches, epochs=2)
        assert model.optimizer.exchanges_weights
        kernel, bias = simulated.weights[0]
        assert_close(model.weights, [kernel.reshape(3, 1), bias], rtol=1e-5)
        ends += model.weights
    return digest(ends)


class Adams:
    """All ranks on one process, each with an Adam of its own, whose learning rate falls.

    Args:
        state: what averages of weights make of the states: keep, average or reset.
    """

    def __init__(self, state: str) -> None:
        random = np.random.default_rng(0)
        start = [random.normal(size=s).astype(np.float32).astype(float) for s in SHAPES]
        self._state, self._size = state, hvd.size()
        self.weights: OfRanks = [list(start) for _ in range(self._size)]
        self._taken = 0
        self._forget()

    def _forget(self) -> None:
        self._since = 0
        self._m, self._v = (
            [[0 * w for w in own] for own in self.weights] for _ in ("first", "second moments")
        )

    def step(self) -> None:
        """Let each rank take a step by itself."""
        self._since += 1
        rate = 0.02 if self._taken <= 3 else 0.01
        for rank in range(self._size):
            for index, g in enumerate(gradients(self._taken, rank)):
                m = self._m[rank][index] = 0.9 * self._m[rank][index] + 0.1 * g
                v = self._v[rank][index] = 0.99 * self._v[rank][index] + 0.01 * g**2
                scale = rate * np.sqrt(1 - 0.99**self._since) / (1 - 0.9**self._since)
                self.weights[rank][index] = self.weights[rank][index] - scale * m / (
                    np.sqrt(v) + 1e-3
                )
        self._taken += 1

    def average(self) -> None:
        """Give all ranks the average of their weights, and settle their states."""

        def shared(values: OfRanks) -> OfRanks:
            return [list(mean(values, [1.0] * self._size)) for _ in values]

        self.weights = shared(self.weights)
        if self._state == "average":
            self._m, self._v = shared(self._m), shared(self._v)
        if self._state == "reset":
            self._forget()


def states_are_kept_averaged_or_reset() -> str:
    """Of an optimizer that was built before, and of new ones: two exchanges and a flush."""
    ends = []
    for state in ("keep", "average", "reset"):
        formula = Adams(state)
        for step in range(5):
            formula.step()
            if step % 2 or step == 4:
                formula.average()
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.02, 0.01])
        adam = keras.optimizers.Adam(rate, beta_2=0.99, epsilon=1e-3)
        optimizer = hvd.DistributedOptimizer(adam, exchange=f"local:steps=2,state={state}")
        variables = stepped(optimizer, own, 5)
        optimizer.flush()
        assert int(optimizer.iterations) == 5
        assert_close(variables, formula.weights[0], rtol=1e-4)
        ends += variables
        if state == "average":
            ends += optimizer.variables
    return digest(ends)


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


# Exchanges with states of every kind; the batches have other numbers of samples.
KEPT = (
    "local:steps=2",
    "local:steps=2,state=average",
    "local:steps=2,state=reset,warmup=1",
    "postlocal:after=3,steps=2,state=reset",
    "postlocal:after=rate,steps=2",
    "blockmomentum:block=9",
    "blockmomentum:steps=2,state=average",
    "diloco:steps=2,state=reset",
    "diloco:steps=2,fragments=2",
)


def checkpoints_go_on_with_the_same_bits() -> None:
    """Saved after three steps, at which postlocal changes sides, and after five."""
    backend = keras.backend.backend()
    for text in KEPT if backend == "torch" else KEPT[3:6:2]:
        for saved in (3, 5):
            whole = Saved(text)
            whole.go_on(0, saved)
            again = Saved(text)
            again.load(whole)
            for each in (whole, again):
                each.go_on(saved, 9)
            assert digest(whole.everything()) == digest(again.everything()), (text, saved)


class Saved:
    """Variables and their optimizer, which a checkpoint holds.

    Args:
        exchange: exchange of the optimizer, as text.
    """

    def __init__(self, exchange: str) -> None:
        random = np.random.default_rng(0)
        self.variables = [keras.Variable(random.normal(size=s).astype("float32")) for s in SHAPES]
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.02, 0.01, 0.005])
        self.optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate), exchange=exchange)
        self.optimizer.build(self.variables)
        self.optimizer.sample_weight = hvd.rank() + 1
        jax = keras.backend.backend() == "jax"
        self._apply = stateless(self.optimizer) if jax else self.optimizer.apply

    def everything(self) -> list[Any]:
        return [*self.variables, *self.optimizer.variables]

    def go_on(self, first: int, last: int) -> None:
        """Take steps with other numbers of samples, and make weights equal."""
        for step in range(first, last):
            if keras.backend.backend() != "jax":  # whose compiled step has taken the first one
                self.optimizer.sample_weight = hvd.rank() + 1 + step % 2
            self._apply([keras.ops.convert_to_tensor(g) for g in own(step)], self.variables)
        self.optimizer.flush()

    def load(self, other: Saved) -> None:
        for mine, theirs in zip(self.everything(), other.everything(), strict=True):
            mine.assign(theirs)
        self.optimizer.load_exchange_state(other.optimizer.exchange_state())


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
    free = keras.optimizers.ScheduleFreeAdamW
    refused("local:steps=2,state=reset", free(), "whose state begins with the weights")
    optimizer = hvd.DistributedOptimizer(sgd(), exchange="local:steps=2,state=average")
    with raising(ValueError, text="cannot leave one out: give state=keep"):
        optimizer.register_local_var(keras.Variable(np.zeros(2)))
    with raising(ValueError, text="accumulation of gradients"):
        hvd.DistributedOptimizer(sgd(), exchange="local:steps=2", backward_passes_per_step=2)


CASES = [
    weights_after_local_steps,
    gradients_are_averaged_before_weights,
    fit_averages_gradients_before_weights,
    states_are_kept_averaged_or_reset,
    blocks_of_samples_in_a_loop_of_ones_own,
    fit_counts_samples,
    checkpoints_go_on_with_the_same_bits,
    fragments_begin_with_the_last_average_of_a_warm_up,
    fit_shows_equal_weights_in_validation,
    what_does_not_go_with_weights_is_refused,
]
