"""Plain averaging during the first steps, before another exchange takes over."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    Exchange,
    ExchangeState,
    FilledBucket,
    LocalSteps,
    StepInfo,
)
from hvdtrain.core.gradients.plan import BucketPlan

__all__ = ["WarmUp"]

_STEPS = "warm-up steps"


class WarmUp(Exchange):
    """Average the buckets, gradients or weights, for some steps, and then use another exchange.

    Weights are averaged after each of these steps.

    Args:
        exchange: exchange after the warm-up.
        steps: number of steps of the warm-up, including those before a checkpoint.

    Raises:
        ValueError: `steps` is negative, or the exchange has a warm-up of its own.
    """

    def __init__(self, exchange: Exchange, steps: int) -> None:
        if steps < 0:
            raise ValueError(f"warm-up steps must be at least 0, got {steps}")
        if exchange.first is not None:
            raise ValueError(f"exchange {exchange.spec!r} begins with plain averages by itself")
        self._exchange, self._steps, self._done = exchange, steps, 0
        self._plain = AllreduceExchange()
        self.spec = f"{exchange.spec} after {steps} steps of {self._plain.spec}"
        self.exactness = f"For {steps} steps the exact average. Then: {exchange.exactness}"
        self.kind, self.hierarchical = exchange.kind, exchange.hierarchical
        self.whole_tensors, self.half_types = exchange.whole_tensors, exchange.half_types
        self.checks_finite, self.uses_rate = exchange.checks_finite, exchange.uses_rate
        self.counts_samples = exchange.counts_samples
        self._follow()

    def _follow(self) -> None:
        """Take over from the exchange what does not hold for plain averages."""
        warm, exchange = self._warm, self._exchange
        self.partial, self.looks_ahead = warm and exchange.partial, warm and exchange.looks_ahead
        self.resets_optimizer = warm and exchange.resets_optimizer

    @property
    def _warm(self) -> bool:
        return self._done >= self._steps

    def prepare(self, plan: BucketPlan) -> None:
        self._exchange.prepare(plan)

    def begin(self, bucket: FilledBucket) -> None:
        self._exchange.begin(bucket)

    def due(self, steps: LocalSteps) -> bool:
        return not self._warm or self._exchange.due(steps)

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        (self._exchange if self._warm else self._plain).reduce(bucket, info, communicators)

    def end(self, info: StepInfo) -> None:
        if self._warm:
            self._exchange.end(info)
        else:
            self._done += 1
            self._follow()

    def state(self) -> ExchangeState:
        inner = self._exchange.state()
        done: Mapping[str, HostArray] = {_STEPS: np.array(self._done)}
        return ExchangeState({**done, **inner.shared}, inner.own)

    def load(self, state: ExchangeState) -> None:
        shared = dict(state.shared)
        if _STEPS not in shared:
            raise ValueError(f"exchange {self.spec!r} was given no {_STEPS}")
        self._done = int(shared.pop(_STEPS))
        self._follow()
        self._exchange.load(ExchangeState(shared, state.own))
