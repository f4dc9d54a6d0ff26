"""Weights that ranks exchange as arrays, after steps on their own gradients."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.fused import begin_fused, exchange_fused
from hvdtrain.core.arrays.fused_plan import OwnStep
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.exchange import LocalSteps, StepInfo

__all__ = ["ExchangedWeights"]


class ExchangedWeights:
    """Counts the steps of this rank, and exchanges weights when their exchange is due.

    A rank counts in an exchange with the samples that it had since all weights were equal, or with
    its steps since then if their samples are not known.

    Args:
        settings: settings, equal on all ranks; the exchange is of kind WEIGHTS.
        name: name of the exchanges, equal on all ranks.

    Attributes:
        steps: number of steps that the program has completed.
        begun: whether the exchange has the weights from which this rank takes steps.
    """

    def __init__(self, settings: GradientSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._exchange = settings.make_exchange()
        self.steps = 0
        self._since_exchange = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Note that the weights of all ranks are equal now (local)."""
        self.begun = False
        self._local_steps, self._samples = 0, 0.0

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all were equal."""
        return self._local_steps == 0

    def begin(self, weights: Sequence[HostArray], parameters: Sequence[object]) -> None:
        """Pass the weights that all ranks have in common to the exchange (collective at first).

        Args:
            weights: weights before a step, of any shapes and floating point dtypes.
            parameters: the parameter of each.
        """
        begin_fused(weights, parameters, self._settings)
        self.begun = True

    def count_step(self, samples: float | None, rate: float | None) -> bool:
        """Count a step; return whether weights are to be exchanged now (local).

        Args:
            samples: samples of this rank in the step; None if unknown.
            rate: learning rate, if known.
        """
        self.steps += 1
        self._since_exchange += 1
        self._local_steps += 1
        self._samples += 1.0 if samples is None else samples
        return self._exchange.due(LocalSteps(self._since_exchange, None, self.steps, rate))

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
        if not self.begun:
            self.begin(weights, parameters)
        own = OwnStep(self._samples, self.steps, flush, self._local_steps)
        results, info = exchange_fused(weights, parameters, self._name, self._settings, own)
        self._since_exchange = 0
        if info.flush or not self._exchange.partial:
            self.begin_anew()
        # Copies: variables may outlive the engine's memory, in which the results are.
        return [result.copy() for result in results], info
