"""Weights that ranks exchange as arrays, after steps on their own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.fused import begin_fused, exchange_fused
from hvdtrain.core.arrays.fused_plan import OwnStep
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.exchange import LocalSteps, StepInfo
from hvdtrain.core.gradients.step_counter import StepCounter

__all__ = ["ExchangedWeights"]


class ExchangedWeights:
    """Exchanges weights when their exchange is due, or when all ranks ask for it.

    A rank counts in an exchange with the samples that it had since all weights were equal, or with
    its steps since then if their samples are not known.

    Args:
        settings: settings, equal on all ranks; the exchange is of kind WEIGHTS.
        name: name of averages of gradients, and the first part of that of exchanges of weights;
            equal on all ranks.

    Attributes:
        counter: counts the steps of this rank.
    """

    def __init__(self, settings: GradientSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._exchange = settings.make_exchange()
        self.counter = StepCounter()
        self._whole = True

    @property
    def averages_gradients(self) -> bool:
        """Whether ranks average gradients at present, as at the beginning of post-local SGD."""
        return self._exchange.first is not None

    def average(
        self, gradients: Sequence[HostArray], parameters: Sequence[object], samples: float | None
    ) -> list[HostArray]:
        """Return the average of gradients, while ranks average them (collective, blocking).

        Args:
            gradients: gradients of this rank, of any shapes and floating point dtypes.
            parameters: the parameter of each.
            samples: samples of this rank in the step; None if unknown.
        """
        settings = replace(self._settings, exchange=self._exchange.first)
        own = OwnStep(samples, self.counter.steps)
        results, info = exchange_fused(gradients, parameters, self._name, settings, own)
        self._whole = info.whole
        return results

    def begin(self, weights: Sequence[HostArray], parameters: Sequence[object]) -> None:
        """Pass the weights that all ranks have in common to the exchange (collective at first).

        Args:
            weights: weights before a step, of any shapes and floating point dtypes.
            parameters: the parameter of each.
        """
        begin_fused(weights, parameters, self._settings)
        self.counter.begun = True

    def count_step(self, samples: float | None, rate: float | None) -> bool:
        """Count a step; return whether weights are to be exchanged now (local).

        After a step on averaged gradients, ranks may change over to exchanges of weights.

        Args:
            samples: samples of this rank in the step; None if unknown.
            rate: learning rate, if known.
        """
        if self.averages_gradients:
            self.counter.steps += 1
            self._exchange.due(LocalSteps(1, None, self.counter.steps, rate, self._whole))
            return False
        return self._exchange.due(self.counter.count(samples, rate))

    def exchange(
        self, weights: Sequence[HostArray], parameters: Sequence[object]
    ) -> list[HostArray]:
        """Return the weights to go on from (collective, blocking).

        Args:
            weights: weights after a step, as in begin().
            parameters: the parameter of each.
        """
        return self._take_part(weights, parameters, flush=False)[0]

    def flush(self, weights: Sequence[HostArray], parameters: Sequence[object]) -> list[HostArray]:
        """Return the weights of all ranks when they are made equal now (collective, blocking).

        A rank that is at its end earlier than others takes part in their exchanges until then.

        Args:
            weights: weights of this rank, as in begin().
            parameters: the parameter of each.
        """
        while True:
            weights, info = self._take_part(weights, parameters, flush=True)
            if info.flush:
                return weights

    def _take_part(
        self, weights: Sequence[HostArray], parameters: Sequence[object], flush: bool
    ) -> tuple[list[HostArray], StepInfo]:
        counter, partial = self.counter, self._exchange.partial
        if not counter.begun:
            self.begin(weights, parameters)
        own = OwnStep(counter.samples, counter.steps, flush, counter.local_steps)
        results, info = exchange_fused(
            weights, parameters, f"{self._name}_weights", self._settings, own
        )
        counter.end_exchange(info, partial)
        # Copies: variables may outlive the engine's memory, in which the results are.
        return [result.copy() for result in results], info
