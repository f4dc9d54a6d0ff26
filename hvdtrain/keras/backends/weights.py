"""The exchange of the weights of an optimizer's variables, after updates on a rank's gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial

import keras

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.local_steps import ExchangedWeights
from hvdtrain.core.exchanges.saved import FORGOTTEN_STEPS, SAMPLES_PER_STEP
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.keras.backends.inner_state import OptimizerState
from hvdtrain.keras.backends.weight_backend import WeightBackend
from hvdtrain.keras.tensors.arrays import to_array
from hvdtrain.keras.tensors.types import Tensor, Variable

# Stands for an unknown number of samples among numbers.
_UNKNOWN = -1.0


class WeightExchange:
    """Updates variables with the gradients of this rank, and exchanges their values when due.

    The optimizer may accumulate the gradients of several passes for a step, and leave out an update
    because gradients are not finite.

    An exchange may begin with averages of gradients. Each step asks the host at which side of the
    switch it is, so that functions that were traced before need not be traced anew.
    """

    def __init__(
        self, settings: GradientSettings, name: str, backend: WeightBackend, scale_local: bool
    ) -> None:
        self._settings, self._backend, self._scale_local = settings, backend, scale_local
        self.flush_in_fit = True
        self._weights = ExchangedWeights(settings, name)
        self._averages_first = self._weights.averages_gradients
        self._passes, self._passes_per_step = 0, 1
        self._samples_of_step: float | None = None
        self.counter = self._weights.counter
        self.inner_state = OptimizerState(settings.make_exchange(), self._weights, backend)

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks exchange weights after the steps that were started, and not gradients."""
        self._backend.wait_for_steps()
        return not self._weights.averages_gradients

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all ranks were equal."""
        self._backend.wait_for_steps()
        return self.counter.synchronized

    @collective
    def update(
        self,
        update: Callable[[Sequence[Tensor | None]], None],
        gradients: Sequence[Tensor | None],
        variables: Sequence[Variable],
        local: Container[int],
        samples: Tensor | float | None,
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        """Update variables, and exchange their values if that is due (collective if due)."""
        if not self._settings.process_set.included():
            update(gradients)
            return
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._passes_per_step = inner.gradient_accumulation_steps or 1
        counted = _UNKNOWN if samples is None else samples
        numbers = [
            keras.ops.cast(number, "float32") for number in (optimizer.learning_rate, counted)
        ]
        if self._averages_first:
            gradients = self._average_at_first(gradients, variables, local, numbers)
        shared = [variable for variable in variables if id(variable) not in local]
        begin = partial(self._begin, shared)
        self._backend.exchange_if(self._must_begin, numbers, begin, _values(shared))
        with self.inner_state.counting_since_reset(optimizer):
            update(gradients)
        exchanged = [*shared, *self.inner_state.variables(optimizer)]
        exchange = partial(self._exchange, shared)
        results = self._backend.exchange_if(self._count, numbers, exchange, _values(exchanged))
        for variable, value in zip(exchanged, results, strict=True):
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

    @collective
    def flush(self, variables: Sequence[Variable], optimizer: keras.optimizers.Optimizer) -> None:
        """Make the values of all ranks equal now (not in a function that is traced)."""
        if not (self.exchanges_weights and self._settings.process_set.included()):
            return
        state = self.inner_state.variables(optimizer)
        weights, settled = self._weights.flush(
            [to_array(variable) for variable in variables],
            [to_array(variable) for variable in state],
            variables,
        )
        for variable, value in zip([*variables, *state], [*weights, *settled], strict=True):
            variable.assign(value)

    def counts(self, optimizer: keras.optimizers.Optimizer) -> dict[str, float | None]:
        """Return counts for a checkpoint, by name."""
        self._backend.wait_for_steps()
        self.counter.check_synchronized("exchange_state")
        return {
            SAMPLES_PER_STEP: self.counter.samples_per_step,
            FORGOTTEN_STEPS: self.inner_state.forgotten_steps(optimizer),
        }

    def begin_anew(self, counts: Mapping[str, float]) -> None:
        """Go on from equal weights."""
        self._passes, self._samples_of_step = 0, None
        self.counter.begin_anew()
        self.counter.samples_per_step = counts.get(SAMPLES_PER_STEP)
        self.inner_state.load(int(counts.get(FORGOTTEN_STEPS, 0)))

    def _must_average(self, numbers: list[HostArray]) -> bool:
        _, self._samples = _rate_and_samples(numbers)
        return self._weights.averages_gradients

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
        _, self._samples = _rate_and_samples(numbers)
        return not self._weights.averages_gradients and not self.counter.begun

    def _begin(self, variables: Sequence[Variable], weights: list[HostArray]) -> list[HostArray]:
        self._weights.begin(weights, variables, self._samples)
        return weights

    def _count(self, numbers: list[HostArray]) -> bool:
        rate, samples = _rate_and_samples(numbers)
        if samples is not None:
            self._samples_of_step = (self._samples_of_step or 0.0) + samples
        self._passes += 1
        if self._passes % self._passes_per_step:
            return False
        samples, self._samples_of_step = self._samples_of_step, None
        return self._weights.count_step(samples, rate)

    def _exchange(self, variables: Sequence[Variable], arrays: list[HostArray]) -> list[HostArray]:
        count = len(variables)
        weights, state = self._weights.exchange(arrays[:count], arrays[count:], variables)
        return [*weights, *state]


def _rate_and_samples(numbers: list[HostArray]) -> tuple[float, float | None]:
    rate, samples = (float(number) for number in numbers)
    return rate, None if samples == _UNKNOWN else samples


def _values(variables: Sequence[Variable]) -> list[Tensor]:
    return [keras.ops.convert_to_tensor(variable) for variable in variables]
