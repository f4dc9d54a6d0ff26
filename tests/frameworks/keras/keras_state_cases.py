"""Checkpoints of exchanges of weights in hvdtrain.keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_optimizer_cases import (
    SHAPES,
    digest,
    own,
    stateless,
)

import hvdtrain.keras as hvd

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
    """Variables and their optimizer, which a checkpoint holds."""

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


CASES = [checkpoints_go_on_with_the_same_bits]
