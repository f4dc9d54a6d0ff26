"""Plain averaging during the first steps or samples, before another exchange takes over."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.core.agreement.operation import AgreedError
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    AllreduceExchange,
    Exchange,
    ExchangeState,
    FilledBucket,
    Kind,
    LocalSteps,
    StepInfo,
    check_count,
)
from hvdtrain.core.gradients.plan import BucketPlan

_STEPS, _SAMPLES = "warm-up steps", "warm-up samples"


class WarmUp(Exchange):
    """Average the buckets, gradients or weights, at first, and then use another exchange.

    Weights are averaged after each of the steps of the warm-up. Every step of which ranks exchange
    the buckets counts, also one that a loss scaler leaves out afterwards. Before an exchange that
    sums, buckets are summed.

    Args:
        exchange: exchange after the warm-up.
        steps: number of steps of the warm-up, including those before a checkpoint.
        samples: number of samples of all ranks in the warm-up, instead of steps (CNTK's
            distributed_after); it ends with the step that reaches the number.

    Raises:
        TypeError: `steps` or `samples` is no whole number.
        ValueError: `steps` or `samples` is negative, both are given, or the exchange has a warm-up
            of its own or, with `samples`, counts all ranks alike.
    """

    def __init__(self, exchange: Exchange, steps: int = 0, samples: int = 0) -> None:
        check_count("warm-up steps", steps, 0)
        check_count("warm-up samples", samples, 0)
        if steps and samples:
            raise ValueError("give the warm-up in steps or samples (distributed_after), not both")
        if exchange.first is not None:
            raise ValueError(f"exchange {exchange.spec!r} begins with plain averages by itself")
        if samples and not exchange.takes_samples:
            raise ValueError(
                f"exchange {exchange.spec!r} counts no samples: give the warm-up in steps, warmup="
            )
        self._exchange, self._length, self._done = exchange, samples or steps, 0
        self._unit = _SAMPLES if samples else _STEPS
        length = f"{self._length} {self._unit.removeprefix('warm-up ')}"
        self.op = exchange.op
        self._plain = AllreduceExchange(self.op)
        self.spec = f"{exchange.spec} after {length} of {self._plain.spec}"
        self.exactness = f"For {length} the exact {self.op.value}. Then: {exchange.exactness}"
        self.kind, self.hierarchical = exchange.kind, exchange.hierarchical
        self.whole_tensors, self.half_types = exchange.whole_tensors, exchange.half_types
        self.checks_finite, self.uses_rate = exchange.checks_finite, exchange.uses_rate
        weights = exchange.kind is Kind.WEIGHTS  # of which ranks always tell how much they count
        self.counts_samples = exchange.counts_samples or (weights and samples > 0)
        self.inner_state, self.uses_scale = exchange.inner_state, exchange.uses_scale
        self.takes_samples, self.on_one_node = exchange.takes_samples, exchange.on_one_node
        self._follow()

    def _follow(self) -> None:
        """Take over from the exchange what does not hold for plain averages."""
        warm, exchange = self._warm, self._exchange
        self.partial, self.looks_ahead = warm and exchange.partial, warm and exchange.looks_ahead
        self.in_warm_up = not warm

    @property
    def _warm(self) -> bool:
        return self._done >= self._length

    @property
    def chosen(self) -> Mapping[str, str] | None:
        return self._exchange.chosen

    def prepare(self, plan: BucketPlan) -> None:
        self._exchange.prepare(plan)

    def note_alone(self) -> None:
        self._exchange.note_alone()

    def silence(self) -> None:
        self._exchange.silence()

    def begin(self, bucket: FilledBucket) -> None:
        self._exchange.begin(bucket)

    def due(self, steps: LocalSteps) -> bool:
        if self._warm:
            return self._exchange.due(steps)
        if self._unit == _SAMPLES and steps.samples is None:
            raise self._unknown_samples()
        return True

    def _unknown_samples(self) -> ValueError:
        return ValueError(
            f"exchange {self.spec!r} counts samples, and no rank has told how many it has: set "
            "optimizer.sample_weight before each step, or give the warm-up in steps"
        )

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        if self._unit == _SAMPLES and not self._warm and not info.weighted:
            raise AgreedError(self._unknown_samples())
        (self._exchange if self._warm else self._plain).reduce(bucket, info, communicators)

    def end(self, info: StepInfo) -> None:
        if self._warm:
            self._exchange.end(info)
        else:
            self._done += round(info.total) if self._unit == _SAMPLES else 1
            self._follow()

    def state(self) -> ExchangeState:
        inner = self._exchange.state()
        done: Mapping[str, HostArray] = {self._unit: np.array(self._done)}
        return ExchangeState({**done, **inner.shared}, inner.own)

    def load(self, state: ExchangeState) -> None:
        shared = dict(state.shared)
        if self._unit not in shared:
            raise ValueError(f"exchange {self.spec!r} was given no {self._unit}")
        self._done = int(shared.pop(self._unit))
        self._follow()
        self._exchange.load(ExchangeState(shared, state.own))
