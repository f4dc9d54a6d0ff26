"""An exchange for each gradient, chosen by measurements of the network and of the steps."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.costs import (
    Chosen,
    Measured,
    best,
    choice_line,
    outcome_line,
    prediction_lines,
    predictions,
)
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.exchanges.measured_costs import Measurement, Place, StepTimes
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.exchanges.power_sgd import PowerSGDExchange
from hvdtrain.core.exchanges.top_k import TopKExchange
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    AllreduceExchange,
    Exchange,
    ExchangeState,
    FilledBucket,
    Kind,
    StepInfo,
    check_count,
    parse_exchange,
)
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.topology import count_threads
from hvdtrain.types import ReduceOp

_AVERAGE = "average"
_ALLOWED: Mapping[str, type[Exchange]] = {
    "half": HalfExchange,
    "nbit": NBitExchange,
    "powersgd": PowerSGDExchange,
    "topk": TopKExchange,
}


class AutoExchange(Exchange):
    """Average at first, measure the steps and the network, and choose an exchange per gradient.

    The plain average is always among those allowed. Rank 0 prints what it measured and predicted,
    and afterwards what a step really takes, unless it is silenced.

    Args:
        allow: exchanges to choose from, as objects or as text: names with "+" between them, and
            "/" between the options of one, as in "half+nbit:bits=2/block=64".
        steps: number of steps that are measured before the choice, and again after it.
        measured: measurements, equal on all ranks, to use instead of making them.

    Raises:
        TypeError: `allow` holds something else than exchanges, or `steps` is no whole number.
        ValueError: an exchange is no average of gradients between nodes, or begins with another
            one; `steps` is not positive, or `measured` is of other exchanges.
    """

    hierarchical = True

    def __init__(
        self,
        allow: str | Sequence[Exchange] = "half",
        steps: int = 10,
        measured: Measured | None = None,
    ) -> None:
        check_count("steps", steps)
        self._plain = AllreduceExchange()
        # Never used themselves, but copied.
        self._candidates: Mapping[str, Exchange] = {_AVERAGE: self._plain, **_allowed(allow)}
        self._names = list(self._candidates)
        if measured is not None and list(measured.names) != self._names:
            raise ValueError(f"measured must have the methods {', '.join(self._names)}")
        self._steps, self._given = steps, measured
        given = list(self._candidates.values())
        self.half_types = all(each.half_types for each in given)
        self.checks_finite = any(each.checks_finite for each in given)
        self.uses_rate = any(each.uses_rate for each in given)
        self.uses_scale = any(each.uses_scale for each in given)
        self.takes_samples = all(each.takes_samples for each in given)
        self.spec = f"auto:steps={steps} of {' or '.join(each.spec for each in given)}"
        self.exactness = (
            f"The exact average until {steps} steps are measured. Then, for each gradient, the "
            f"fastest of {', '.join(self._names)}."
        )
        self._plan = BucketPlan((), (), 0, 0)
        self._prints, self._silent = False, False
        self._begin(None)

    def _begin(self, choice: Chosen | None) -> None:
        """Use a choice from the next step on; None to measure."""
        self._choice = choice
        self._next: Chosen | None = None
        self._times = StepTimes()
        self._memory: dict[Place, Buffer] = {}

    @property
    def chosen(self) -> Mapping[str, str] | None:
        if self._choice is None:
            return None
        methods = zip(self._plan.specs, self._choice.methods, strict=False)
        return {spec.name: self._names[method] for spec, method in methods}

    def prepare(self, plan: BucketPlan) -> None:
        for each in self._candidates.values():
            each.prepare(plan)
        if self._choice is not None:
            if self._plan.specs:
                self._choice = self._choice.carried_to(self._plan, plan)
            self._choice.prepare(plan)
        self._plan = plan
        self._times.clear()

    def note_alone(self) -> None:
        if self._choice is None:
            self._prints = not self._silent
            self._begin(self._only_average(1))

    def silence(self) -> None:
        self._silent = True

    @collective
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        if self._choice is not None and self._choice.ranks != info.size:
            self._prints = communicators.all_ranks.rank == 0 and not self._silent
            before, now = _ranks(self._choice.ranks), _ranks(info.size)
            self._say(f"the choice was made for {before}, and there are {now} now: choosing again")
            self._begin(None)
        if self._choice is not None:
            self._choice.reduce(bucket, info, communicators)
            return
        began = time.perf_counter()
        self._plain.reduce(bucket, info, communicators)
        self._times.note_bucket(bucket.filled_at, time.perf_counter() - began)
        self._memory[bucket.layout.dtype, bucket.layout.device] = bucket.buffer.like(0)
        # Nothing is computed after the last bucket, which makes the measurement quiet.
        if bucket.number == len(self._plan.buckets) - 1:
            self._prints = communicators.all_ranks.rank == 0 and not self._silent
            if communicators.one_node:
                self._next = self._only_average(info.size)
            elif len(self._times.seconds) >= self._steps:
                self._next = self._predict(info, communicators)

    def end(self, info: StepInfo) -> None:
        if self._choice is None or self._prints:
            self._times.end_step(time.perf_counter())
        if self._choice is not None:
            self._choice.end(info)
            if self._prints and len(self._times.seconds) == self._steps:
                if (predicted := self._choice.predicted) is not None:
                    seconds = self._times.median_seconds()
                    self._say(outcome_line(seconds, predicted, self._choice.before))
                self._prints = False
        elif self._next is not None:
            self._begin(self._next)

    def _say(self, *lines: str) -> None:
        if self._prints:
            for line in lines:
                print(f"hvdtrain: exchange auto: {line}", file=sys.stderr, flush=True)

    def _only_average(self, size: int) -> Chosen:
        """Return the choice of ranks without a network."""
        where = "there is one rank" if size == 1 else "all ranks are on one node"
        self._say(f"chosen: average, because {where}")
        average = [0] * len(self._plan.specs)
        return Chosen.begin(average, size, list(self._candidates.values()))

    @collective
    def _predict(self, info: StepInfo, communicators: Communicators) -> Chosen:
        """Measure, predict, and return the choice of rank 0."""
        now = self._times.median_seconds()
        measured = self._given or Measurement(
            self._candidates,
            self._plan,
            self._memory,
            self._times,
            count_threads(os.environ, sys.modules),
        ).run(communicators)
        methods = np.zeros(len(self._plan.specs), np.int64)
        predicted = None
        if measured.valid:
            found = predictions(measured, self._plan)
            self._say(*prediction_lines(measured, found, now))
            methods[:], predicted = best(found).choice, best(found).seconds
        else:
            self._say("the network was too busy to measure")
        communicators.all_ranks.broadcast(Buffer.from_array(methods), 0)
        self._say(choice_line(self._names, self._plan, methods.tolist()))
        candidates = list(self._candidates.values())
        return Chosen.begin(methods.tolist(), info.size, candidates, predicted, now)

    def state(self) -> ExchangeState:
        return ExchangeState() if self._choice is None else self._choice.state()

    def load(self, state: ExchangeState) -> None:
        chosen = Chosen.restored(state, list(self._candidates.values()))
        if chosen is None:  # it was saved before the choice
            super().load(state)
        self._begin(chosen)


def _allowed(allow: str | Sequence[Exchange]) -> dict[str, Exchange]:
    """Return exchanges by name."""
    if isinstance(allow, str):
        texts = [text.strip() for text in allow.split("+")]
        found = {text: _from_text(text) for text in texts if text != _AVERAGE}
    else:
        for each in allow:
            if not isinstance(each, Exchange):
                raise TypeError(f"allow must hold exchanges, or be text, got {each!r}")
        found = {each.spec: each for each in allow}
    for name, each in found.items():
        if each.kind is not Kind.GRADIENTS or not each.hierarchical:
            raise ValueError(f"{name} is not an exchange of gradients between nodes: leave it out")
        if each.op is not ReduceOp.AVERAGE:
            raise ValueError(f"{name} does not average, as auto does until it has chosen")
        if each.in_warm_up or isinstance(each, AutoExchange):
            raise ValueError(f"{name} begins with plain averages, as auto does by itself")
    return found


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _from_text(text: str) -> Exchange:
    kind, options = parse_exchange(text.replace("/", ","), _ALLOWED, {})
    make: Callable[..., Exchange] = kind
    return make(**options)
