"""The exchanges that were chosen for the gradients of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, ExchangeState, FilledBucket, StepInfo
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.prediction.costs import runs_of

_CHOICE = "auto choice"


@dataclass(frozen=True)
class Chosen:
    """The exchanges that were chosen, and what was known then.

    Attributes:
        predicted: predicted time of a step in seconds; None if it is not known.
        before: measured time of a step with the average in seconds; None if it is not known.
    """

    methods: tuple[int, ...]
    ranks: int
    exchanges: Mapping[int, Exchange]
    predicted: float | None = None
    before: float | None = None

    @classmethod
    def begin(
        cls,
        methods: Sequence[int],
        ranks: int,
        candidates: Sequence[Exchange],
        predicted: float | None = None,
        before: float | None = None,
    ) -> Chosen:
        """Return a choice whose exchanges begin."""
        used = {number: deepcopy(candidates[number]) for number in sorted({0, *methods})}
        return cls(tuple(methods), ranks, used, predicted, before)

    @classmethod
    def restored(cls, state: ExchangeState, candidates: Sequence[Exchange]) -> Chosen | None:
        """Return a choice as it was when state() was called; None if there was none."""
        if _CHOICE not in state.shared:
            return None
        ranks, *methods = state.shared[_CHOICE].tolist()
        chosen = cls.begin(methods, ranks, candidates)
        for number, exchange in chosen.exchanges.items():
            shared, own = (_part(number, arrays) for arrays in (state.shared, state.own))
            exchange.load(ExchangeState(shared, own))
        return chosen

    def carried_to(self, before: BucketPlan, plan: BucketPlan) -> Chosen:
        """Return the same choice for the parameters of another plan; new ones are averaged."""
        specs = zip(before.specs, self.methods, strict=False)
        methods = {spec.name: method for spec, method in specs}
        return replace(self, methods=tuple(methods.get(spec.name, 0) for spec in plan.specs))

    def state(self) -> ExchangeState:
        """Return a copy of the choice and of the state of its exchanges."""
        shared: dict[str, HostArray] = {_CHOICE: np.array([self.ranks, *self.methods], np.int64)}
        own: dict[str, HostArray] = {}
        for number, exchange in self.exchanges.items():
            state = exchange.state()
            shared |= {f"{number}.{name}": array for name, array in state.shared.items()}
            own |= {f"{number}.{name}": array for name, array in state.own.items()}
        return ExchangeState(shared, own)

    def prepare(self, plan: BucketPlan) -> None:
        """Prepare for a plan, as `Exchange.prepare`."""
        for exchange in self.exchanges.values():
            exchange.prepare(plan)

    @collective
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        """Overwrite a bucket with the result, as `Exchange.reduce`."""
        for method, first, last in runs_of(bucket.layout, self.methods):
            self.exchanges[method].reduce(bucket.section(first, last), info, communicators)

    def end(self, info: StepInfo) -> None:
        """End a step, as `Exchange.end`."""
        for exchange in self.exchanges.values():
            exchange.end(info)


def _part(number: int, arrays: Mapping[str, HostArray]) -> dict[str, HostArray]:
    """Return the arrays of the exchange of a number, by their own names."""
    start = f"{number}."
    return {n.removeprefix(start): array for n, array in arrays.items() if n.startswith(start)}
