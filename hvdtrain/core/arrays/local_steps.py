"""Weights that ranks exchange as arrays, after steps on their own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arguments import GradientSettings
from hvdtrain.core.arrays.fused import begin_fused, exchange_fused, reduce_fused
from hvdtrain.core.arrays.layouts import Layout
from hvdtrain.core.gradients.exchange import InnerState, LocalSteps, StepInfo
from hvdtrain.core.gradients.step_info import OwnStep, StepCounter


class ExchangedWeights:
    """Exchanges weights when their exchange is due, or when all ranks ask for it.

    A rank counts in an exchange with the samples that it had since all weights were equal, or with
    its steps since then if their samples are not known.
    """

    def __init__(self, settings: GradientSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._exchange = settings.make_exchange()
        self.counter = StepCounter()
        self.initial_state: Sequence[HostArray] = ()
        self.anew = False
        self._whole = True

    @property
    def averages_gradients(self) -> bool:
        """Whether ranks average gradients now, as at the beginning of post-local SGD."""
        return self._exchange.first is not None

    @collective
    def average(
        self,
        gradients: Sequence[HostArray],
        parameters: Sequence[object],
        samples: float | None,
        layout: Layout,
    ) -> list[HostArray]:
        """Return the average of the dense gradients of a layout, while ranks average them."""
        settings = replace(self._settings, exchange=self._exchange.first)
        own = OwnStep(samples, self.counter.steps)
        results, info = exchange_fused(gradients, parameters, self._name, settings, own, layout)
        self._whole = info.whole
        return results

    @collective
    def begin(
        self, weights: Sequence[HostArray], parameters: Sequence[object], samples: float | None
    ) -> None:
        counts = self._exchange.counts_samples and self.counter.samples_per_step is None
        if counts and samples is not None:
            self._take_part(weights, (), parameters, flush=False, weight=samples)
        self._begin(weights, parameters)

    @collective
    def _begin(self, weights: Sequence[HostArray], parameters: Sequence[object]) -> None:
        begin_fused(weights, parameters, self._settings)
        self.counter.begun = True

    def count_step(self, samples: float | None, rate: float | None) -> bool:
        """Count a step; return whether weights are to be exchanged now.

        After a step on averaged gradients, ranks may change over to exchanges of weights.
        """
        if self.averages_gradients:
            self.counter.steps += 1
            self._exchange.due(LocalSteps(1, None, self.counter.steps, rate, self._whole))
            return False
        return self._exchange.due(self.counter.count(samples, rate))

    @collective
    def exchange(
        self,
        weights: Sequence[HostArray],
        state: Sequence[HostArray],
        parameters: Sequence[object],
    ) -> tuple[list[HostArray], list[HostArray]]:
        """Return the weights and the optimizer's state to continue from."""
        samples = self.counter.samples
        weights, state, _ = self._take_part(weights, state, parameters, False, samples)
        return weights, state

    @collective
    def flush(
        self,
        weights: Sequence[HostArray],
        state: Sequence[HostArray],
        parameters: Sequence[object],
    ) -> tuple[list[HostArray], list[HostArray]]:
        """Make weights equal; until its end a rank takes part in the others' exchanges."""
        while True:
            samples = self.counter.samples
            weights, state, info = self._take_part(weights, state, parameters, True, samples)
            if info.flush:
                return weights, state

    @collective
    def _take_part(
        self,
        weights: Sequence[HostArray],
        state: Sequence[HostArray],
        parameters: Sequence[object],
        flush: bool,
        weight: float,
    ) -> tuple[list[HostArray], list[HostArray], StepInfo]:
        counter, exchange = self.counter, self._exchange
        partial, in_warm_up = exchange.partial, exchange.in_warm_up
        if not counter.begun:
            self._begin(weights, parameters)
        own = OwnStep(weight, counter.steps, flush, counter.local_steps)
        results, info = exchange_fused(
            weights, parameters, f"{self._name}_weights", self._settings, own
        )
        counter.end_exchange(info, partial, exchange.counts_samples)
        if state and info.drifted and not in_warm_up:
            state = self._settled(state, weight)
        # Copies: variables may outlive the engine's memory, in which the results are.
        return [each.copy() for each in results], [each.copy() for each in state], info

    @collective
    def _settled(self, state: Sequence[HostArray], weight: float) -> Sequence[HostArray]:
        """Return what becomes of the optimizer's state (collective if it is averaged)."""
        if self._exchange.inner_state is InnerState.RESET:
            self.anew = True
            return self.initial_state
        settings = GradientSettings(process_set=self._settings.process_set)
        return reduce_fused(state, range(len(state)), f"{self._name}_state", settings, weight)
