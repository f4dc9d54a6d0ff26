"""The exchange of the weights of an optimizer's variables, after updates on a rank's gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Protocol

import keras

from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.local_steps import ExchangedWeights
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.keras.tensors.arrays import to_array
from hvdtrain.keras.tensors.types import Tensor, Variable

__all__ = ["WeightBackend", "WeightExchange", "refuse_weights"]

# Stands for an unknown number of samples among numbers.
_UNKNOWN = -1.0


class WeightBackend(Protocol):
    """What exchanges of weights need of Keras's backend."""

    def exchange_if(
        self,
        due: Callable[[list[HostArray]], bool],
        numbers: Sequence[Tensor],
        exchange: Callable[[list[HostArray]], list[HostArray]],
        weights: Sequence[Tensor],
    ) -> list[Tensor]:
        """Exchange weights if that is due, else copy nothing to the host (collective if due).

        Args:
            due: returns whether the exchange is due; called in each step.
            numbers: arguments of `due`, 0-d.
            exchange: returns arrays with the shapes and dtypes of its arguments.
            weights: arguments of `exchange`, of any shapes and floating point dtypes.

        Returns:
            The results of `exchange`, or `weights`.
        """

    def wait_for_steps(self) -> None:
        """Wait until all steps that were started are done (local)."""


class WeightExchange:
    """Updates variables with the gradients of this rank, and exchanges their values when due.

    An exchange may begin with averages of gradients. Each step asks the host at which side of the
    switch it is, so that functions that were traced before need not be traced anew.

    Args:
        settings: settings; the exchange is of kind WEIGHTS.
        name: operation name of the optimizer.
        backend: Keras's backend.
        scale_local: divide gradients that are not averaged by the number of ranks while others are.

    Attributes:
        counter: counts the steps of this rank.
        flush_in_fit: whether `fit` makes weights equal before validation and at the end of an
            epoch.
    """

    def __init__(
        self, settings: GradientSettings, name: str, backend: WeightBackend, scale_local: bool
    ) -> None:
        self._settings, self._backend, self._scale_local = settings, backend, scale_local
        self.flush_in_fit = True
        self._weights = ExchangedWeights(settings, name)
        self._averages_first = self._weights.averages_gradients
        self.counter = self._weights.counter

    @property
    def averages_gradients(self) -> bool:
        """Whether ranks average gradients at present, and no weights."""
        return self._weights.averages_gradients

    def update(
        self,
        update: Callable[[Sequence[Tensor | None]], None],
        gradients: Sequence[Tensor | None],
        variables: Sequence[Variable],
        local: Container[int],
        samples: Tensor | int | None,
        rate: Tensor | float,
    ) -> None:
        """Update variables, and exchange their values if that is due (collective if due).

        Args:
            update: takes the step of this rank's own optimizer on gradients.
            gradients: gradients of this rank.
            variables: the variable of each gradient.
            local: variables that are not exchanged, by id(variable).
            samples: samples of this rank in the step; None if unknown.
            rate: learning rate.
        """
        if not self._settings.process_set.included():
            update(gradients)
            return
        counted = _UNKNOWN if samples is None else samples
        numbers = [keras.ops.cast(number, "float32") for number in (rate, counted)]
        if self._averages_first:
            gradients = self._average_at_first(gradients, variables, local, numbers)
        shared = [variable for variable in variables if id(variable) not in local]
        begin = partial(self._begin, shared)
        self._backend.exchange_if(self._must_begin, numbers, begin, _values(shared))
        update(gradients)
        exchange = partial(self._exchange, shared)
        results = self._backend.exchange_if(self._count, numbers, exchange, _values(shared))
        for variable, value in zip(shared, results, strict=True):
            variable.assign(value)

    def _average_at_first(
        self,
        gradients: Sequence[Tensor | None],
        variables: Sequence[Variable],
        local: Container[int],
        numbers: Sequence[Tensor],
    ) -> list[Tensor | None]:
        """Return the averages of gradients, or the gradients after the switch."""
        results = list(gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        average = partial(self._average, [variables[i] for i in present], local)
        own = [gradient for gradient in gradients if gradient is not None]
        averages = self._backend.exchange_if(self._must_average, numbers, average, own)
        for i, result in zip(present, averages, strict=True):
            results[i] = result
        return results

    def flush(self, variables: Sequence[Variable]) -> None:
        """Make the values of all ranks equal now (collective, not in a function that is traced).

        Args:
            variables: variables that are exchanged.
        """
        if self.averages_gradients or not self._settings.process_set.included():
            return
        self._backend.wait_for_steps()
        results = self._weights.flush([to_array(variable) for variable in variables], variables)
        for variable, value in zip(variables, results, strict=True):
            variable.assign(value)

    def _must_average(self, numbers: list[HostArray]) -> bool:
        _, self._samples = _rate_and_samples(numbers)
        return self.averages_gradients

    def _average(
        self, variables: Sequence[Variable], local: Container[int], gradients: list[HostArray]
    ) -> list[HostArray]:
        pairs = list(zip(variables, gradients, strict=True))
        shared = [(v, gradient) for v, gradient in pairs if id(v) not in local]
        averages = iter(
            self._weights.average(
                [gradient for _, gradient in shared], [v for v, _ in shared], self._samples
            )
        )
        divisor = self._settings.process_set.size() if self._scale_local else 1
        return [gradient / divisor if id(v) in local else next(averages) for v, gradient in pairs]

    def _must_begin(self, numbers: list[HostArray]) -> bool:
        return not self.averages_gradients and not self.counter.begun

    def _begin(self, variables: Sequence[Variable], weights: list[HostArray]) -> list[HostArray]:
        self._weights.begin(weights, variables)
        return weights

    def _count(self, numbers: list[HostArray]) -> bool:
        rate, samples = _rate_and_samples(numbers)
        return self._weights.count_step(samples, rate)

    def _exchange(self, variables: Sequence[Variable], weights: list[HostArray]) -> list[HostArray]:
        return self._weights.exchange(weights, variables)


def _rate_and_samples(numbers: list[HostArray]) -> tuple[float, float | None]:
    rate, samples = (float(number) for number in numbers)
    return rate, None if samples == _UNKNOWN else samples


def _values(variables: Sequence[Variable]) -> list[Tensor]:
    return [keras.ops.convert_to_tensor(variable) for variable in variables]


def refuse_weights(settings: GradientSettings, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse what does not go with an exchange of weights in Keras (local).

    Args:
        settings: settings of the optimizer.
        optimizer: optimizer of this rank.

    Raises:
        ValueError: the optimizer scales the loss or accumulates gradients, or the exchange resets
            the optimizer's state or counts samples.
    """
    exchange = settings.exchange
    if exchange is None or not settings.weights:
        return
    reasons = {
        "a LossScaleOptimizer: leave it out, or use bfloat16": isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ),
        "accumulation of gradients: leave that out, ranks take local steps anyway": bool(
            optimizer.gradient_accumulation_steps
        ),
        "resetting the optimizer's state in Keras: give reset=false, or state=keep": (
            exchange.resets_optimizer
        ),
        "counting samples in Keras: give steps= instead": exchange.counts_samples,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"exchange {exchange.spec!r} does not go with {reason}")
