"""States of the ranks' optimizers with exchanges of weights, and checkpoints of them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from exchange_formulas import OfRanks, mean
from keras_optimizer_cases import (
    SHAPES,
    assert_close,
    digest,
    gradients,
    own,
    stateless,
    stepped,
)

import hvdtrain.keras as hvd


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


CASES = [states_are_kept_averaged_or_reset, checkpoints_go_on_with_the_same_bits]
