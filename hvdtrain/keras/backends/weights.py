"""The exchange of the weights of an optimizer's variables, after updates on a rank's gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arguments import GradientSettings
from hvdtrain.core.arrays.fused import begin_fused, exchange_fused, is_overwritten, reduce_fused
from hvdtrain.core.arrays.layouts import Layout, reduce_present
from hvdtrain.core.exchanges.state import FORGOTTEN_STEPS, SAMPLES_PER_STEP
from hvdtrain.core.gradients.exchange import Exchange, InnerState, LocalSteps, StepInfo
from hvdtrain.core.gradients.step_info import OwnStep, StepCounter
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable, to_array


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


class WeightBackend(Protocol):
    """What exchanges of weights need of Keras's backend."""

    @collective
    def exchange_if(
        self,
        due: Callable[[list[HostArray]], bool],
        numbers: Sequence[BackendTensor],
        exchange: Callable[[list[HostArray]], list[HostArray]],
        weights: Sequence[BackendTensor],
    ) -> list[BackendTensor]:
        """Exchange weights if that is due, else copy nothing to the host (collective if due)."""

    def is_tracing(self) -> bool:
        """Return whether this function is called by one that is being traced (local)."""

    def wait_for_steps(self) -> None:
        """Wait until all steps that were started are done, if Python continues before."""
        return None

    def outside_traces(self) -> AbstractContextManager[object]:
        """Return a context in which variables have values, also while a function is traced."""
        return nullcontext()


class OptimizerState:
    """The state of a rank's own optimizer, between exchanges of weights.

    After a reset the optimizer counts its steps from there, for corrections of its bias, as a new
    one does. Its variable `iterations` continues, because learning rate schedules depend on it.
    """

    def __init__(
        self, exchange: Exchange, weights: ExchangedWeights, backend: WeightBackend
    ) -> None:
        self._what, self._weights, self._backend = exchange.inner_state, weights, backend
        self.forgotten: BackendTensor | None = None
        self._forgotten_steps = 0

    @property
    def settles(self) -> bool:
        """Whether exchanges average or reset the state."""
        return self._what is not InnerState.KEEP

    def variables(self, optimizer: keras.optimizers.Optimizer) -> list[KerasVariable]:
        """Return the variables that exchanges average or reset."""
        return _state_variables(optimizer) if self.settles else []

    def note_built(self, optimizer: keras.optimizers.Optimizer, is_new: bool) -> None:
        """Keep the initial state of an optimizer if exchanges reset it."""
        if self._what is not InnerState.RESET:
            return
        with self._backend.outside_traces():
            if not is_new:
                new = type(optimizer).from_config(optimizer.get_config())
                new.build(optimizer._trainable_variables)
                optimizer = new
            self._weights.initial_state = [to_array(v) for v in _state_variables(optimizer)]

    @contextmanager
    def counting_since_reset(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Let the optimizer count its steps from the last reset in this block."""
        if self._what is InnerState.RESET:
            steps = keras.ops.cast(optimizer._iterations, "int32")
            none = [keras.ops.zeros_like(steps)]
            (self.forgotten,) = self._backend.exchange_if(
                self._has_reset, [steps], self._tell, none
            )
        try:
            yield
        finally:
            self.forgotten = None

    def forgotten_steps(self, optimizer: keras.optimizers.Optimizer) -> int | None:
        """Return the number of steps before the last reset, None without resets."""
        if self._what is not InnerState.RESET:
            return None
        return int(to_array(optimizer._iterations)) if self._weights.anew else self._forgotten_steps

    def load(self, forgotten_steps: int) -> None:
        """Go on from a result of forgotten_steps()."""
        self._forgotten_steps, self._weights.anew = forgotten_steps, False

    def _has_reset(self, numbers: list[HostArray]) -> bool:
        if self._weights.anew:
            self.load(int(numbers[0]))
        return self._forgotten_steps > 0

    def _tell(self, _: list[HostArray]) -> list[HostArray]:
        return [np.asarray(self._forgotten_steps, np.int32)]


def _state_variables(optimizer: keras.optimizers.Optimizer) -> list[KerasVariable]:
    """Return the floating point variables of an optimizer, except its learning rate.

    Those of a loss scale and of accumulated gradients are not among them. Before an optimizer is
    built, it has none.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    others = [inner._learning_rate, *getattr(inner, "_accumulated_gradients", [])]
    known = {id(variable) for variable in others}
    return [v for v in inner.variables if id(v) not in known and "float" in v.dtype]


# Stands for an unknown number of samples among numbers.
_UNKNOWN = -1.0


class WeightExchange:
    """Updates variables with the gradients of this rank, and exchanges their values when due.

    The optimizer may accumulate the gradients of several passes for a step, and leave out an update
    because gradients are not finite.

    An exchange may begin with averages of gradients. Each step asks the host at which side of the
    switch it is, so that functions that were traced before need not be traced again.
    """

    def __init__(
        self, settings: GradientSettings, name: str, backend: WeightBackend, scale_local: bool
    ) -> None:
        self._settings, self._backend, self._scale_local = settings, backend, scale_local
        self._name = name
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
        self._backend.wait_for_steps()
        return self.counter.synchronized

    @collective
    def update(
        self,
        update: Callable[[Sequence[BackendTensor | None]], None],
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        local: Container[int],
        samples: BackendTensor | float | None,
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
        gradients: Sequence[BackendTensor | None],
        variables: Sequence[KerasVariable],
        local: Container[int],
        numbers: Sequence[BackendTensor],
    ) -> list[BackendTensor | None]:
        """Return the averages of gradients, or the gradients after the switch."""
        fixed = self._backend.is_tracing()
        absent = {i for i, gradient in enumerate(gradients) if gradient is None}
        # Where nothing is traced, a gradient that only other ranks have begins as zeros.
        passed = [i for i in range(len(gradients)) if i not in absent or not fixed]
        shared = [i for i, variable in enumerate(variables) if id(variable) not in local]
        divisor = self._settings.process_set.size() if self._scale_local else 1

        def average(arrays: list[HostArray]) -> list[HostArray]:
            found = dict(zip(passed, arrays, strict=True))

            def reduce(given: Sequence[HostArray], layout: Layout) -> list[HostArray]:
                owners = [variables[shared[n]] for n in layout.dense]
                return self._weights.average(given, owners, self._samples, layout)

            averages = reduce_present(
                [None if i in absent else found[i] for i in shared],
                [variables[i].path for i in shared],
                self._name,
                lambda n: found[shared[n]],
                reduce,
                fixed,
            )
            known = {i: a for i, a in zip(shared, averages, strict=True) if a is not None}
            absent.difference_update(known)
            return [
                known[i]
                if i in known
                else found[i] / (1 if is_overwritten(variables[i]) else divisor)
                for i in passed
            ]

        own = [
            keras.ops.zeros(variable.shape, variable.dtype) if gradient is None else gradient
            for gradient, variable in ((gradients[i], variables[i]) for i in passed)
        ]
        averages = self._backend.exchange_if(self._must_average, numbers, average, own)
        found = dict(zip(passed, averages, strict=True))
        return [None if i in absent else found[i] for i in range(len(gradients))]

    @collective
    def flush(
        self, variables: Sequence[KerasVariable], optimizer: keras.optimizers.Optimizer
    ) -> None:
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

    def _must_begin(self, numbers: list[HostArray]) -> bool:
        _, self._samples = _rate_and_samples(numbers)
        return not self._weights.averages_gradients and not self.counter.begun

    def _begin(
        self, variables: Sequence[KerasVariable], weights: list[HostArray]
    ) -> list[HostArray]:
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

    def _exchange(
        self, variables: Sequence[KerasVariable], arrays: list[HostArray]
    ) -> list[HostArray]:
        count = len(variables)
        weights, state = self._weights.exchange(arrays[:count], arrays[count:], variables)
        return [*weights, *state]


def _rate_and_samples(numbers: list[HostArray]) -> tuple[float, float | None]:
    rate, samples = (float(number) for number in numbers)
    return rate, None if samples == _UNKNOWN else samples


def _values(variables: Sequence[KerasVariable]) -> list[BackendTensor]:
    return [keras.ops.convert_to_tensor(variable) for variable in variables]
