"""The exchange of the weights of an optimizer's variables, after updates on a rank's gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import keras
import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.fused import (
    Layout,
    begin_fused,
    exchange_fused,
    is_overwritten,
    reduce_present,
)
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.exchange import (
    FORGOTTEN_STEPS,
    SAMPLES_PER_STEP,
    InnerState,
    LocalSteps,
    StepInfo,
)
from hvdtrain.core.gradients.step_info import OwnStep, StepCounter
from hvdtrain.keras.backends.backend import Backend
from hvdtrain.keras.backends.types import BackendTensor, KerasVariable, to_array

# Stands for an unknown number of samples among numbers.
_UNKNOWN = -1.0


class WeightExchange:
    """Updates variables with the gradients of this rank, and exchanges their values when due.

    A rank counts in an exchange with the samples that it had since all weights were equal, or with
    its steps since then. The optimizer may accumulate the gradients of several passes for a step,
    and leave out an update because gradients are not finite.

    An exchange may begin with averages of gradients. Each step asks the host at which side of the
    switch it is, so that functions that were traced before need not be traced again.

    After a reset of its state the optimizer counts its steps from there, for corrections of its
    bias, as a new one does. Its variable `iterations` continues, because learning rate schedules
    depend on it.
    """

    def __init__(
        self, settings: GradientSettings, name: str, backend: Backend, scale_local: bool
    ) -> None:
        self._settings, self._name = settings, name
        self._backend, self._scale_local = backend, scale_local
        self._exchange = settings.make_exchange()
        self._averages_first = self._exchange.first is not None
        self.flush_in_fit = True
        self.counter = StepCounter()
        self._passes, self._passes_per_step = 0, 1
        self._samples: float | None = None
        self._samples_of_step: float | None = None
        self._whole = True
        # Of resets: the state that follows, whether one has just been, and the steps before it,
        # also as a tensor during an update.
        self._resets = self._exchange.inner_state is InnerState.RESET
        self._initial_state: Sequence[HostArray] = ()
        self._anew, self._forgotten_steps = False, 0
        self.forgotten: BackendTensor | None = None

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks exchange weights after the steps that were started, and not gradients."""
        self._backend.wait_for_steps()
        return self._exchange.first is None

    @property
    def synchronized(self) -> bool:
        self._backend.wait_for_steps()
        return self.counter.synchronized

    @property
    def settles(self) -> bool:
        """Whether exchanges average or reset the optimizer's state."""
        return self._exchange.inner_state is not InnerState.KEEP

    def note_built(self, optimizer: keras.optimizers.Optimizer, is_new: bool) -> None:
        """Keep the initial state of an optimizer if exchanges reset it."""
        if not self._resets:
            return
        with self._backend.outside_traces():
            if not is_new:
                new = type(optimizer).from_config(optimizer.get_config())
                new.build(optimizer._trainable_variables)
                optimizer = new
            self._initial_state = [to_array(v) for v in _state_variables(optimizer)]

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
        begin = partial(self._begin_step, shared)
        self._backend.exchange_if(self._must_begin, numbers, begin, _values(shared))
        with self._counting_since_reset(optimizer):
            update(gradients)
        exchanged = [*shared, *self._settled_variables(optimizer)]
        exchange = partial(self._end_step, shared)
        results = self._backend.exchange_if(self._count_pass, numbers, exchange, _values(exchanged))
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

        def reduce(given: Sequence[HostArray], layout: Layout) -> list[HostArray]:
            owners = [variables[shared[n]] for n in layout.dense]
            settings = replace(self._settings, exchange=self._exchange.first)
            own = OwnStep(self._samples, self.counter.steps)
            results, info = exchange_fused(given, owners, self._name, settings, own, layout)
            self._whole = info.whole
            return results

        def average(arrays: Sequence[HostArray]) -> list[HostArray]:
            found = dict(zip(passed, arrays, strict=True))
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

    @contextmanager
    def _counting_since_reset(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        """Let the optimizer count its steps from the last reset in this block."""

        def has_reset(numbers: Sequence[HostArray]) -> bool:
            if self._anew:
                self._forgotten_steps, self._anew = int(numbers[0]), False
            return self._forgotten_steps > 0

        def tell(_: Sequence[HostArray]) -> list[HostArray]:
            return [np.asarray(self._forgotten_steps, np.int32)]

        if self._resets:
            steps = keras.ops.cast(optimizer._iterations, "int32")
            none = [keras.ops.zeros_like(steps)]
            (self.forgotten,) = self._backend.exchange_if(has_reset, [steps], tell, none)
        try:
            yield
        finally:
            self.forgotten = None

    # Asked and called on the host, when a step runs.

    def _must_average(self, numbers: Sequence[HostArray]) -> bool:
        _, self._samples = _rate_and_samples(numbers)
        return self._exchange.first is not None

    def _must_begin(self, numbers: Sequence[HostArray]) -> bool:
        _, self._samples = _rate_and_samples(numbers)
        return self._exchange.first is None and not self.counter.begun

    @collective
    def _begin_step(
        self, variables: Sequence[KerasVariable], weights: Sequence[HostArray]
    ) -> Sequence[HostArray]:
        counts = self._exchange.counts_samples and self.counter.samples_per_step is None
        if counts and self._samples is not None:
            self._take_part(weights, (), variables, flush=False, weight=self._samples)
        self._begin(weights, variables)
        return weights

    def _count_pass(self, numbers: Sequence[HostArray]) -> bool:
        """Count a pass; return whether weights are to be exchanged now."""
        rate, samples = _rate_and_samples(numbers)
        if samples is not None:
            self._samples_of_step = (self._samples_of_step or 0.0) + samples
        self._passes += 1
        if self._passes % self._passes_per_step:
            return False
        samples, self._samples_of_step = self._samples_of_step, None
        if self._exchange.first is None:
            return self._exchange.due(self.counter.count(samples, rate))
        self.counter.steps += 1  # after which ranks may change over to exchanges of weights
        self._exchange.due(LocalSteps(1, None, self.counter.steps, rate, self._whole))
        return False

    @collective
    def _end_step(
        self, variables: Sequence[KerasVariable], arrays: Sequence[HostArray]
    ) -> list[HostArray]:
        count, samples = len(variables), self.counter.samples
        weights, state = arrays[:count], arrays[count:]
        return self._take_part(weights, state, variables, flush=False, weight=samples)[0]

    @collective
    def flush(
        self, variables: Sequence[KerasVariable], optimizer: keras.optimizers.Optimizer
    ) -> None:
        """Make all ranks' values equal, by exchanges until all ranks have asked for that."""
        if not (self.exchanges_weights and self._settings.process_set.included()):
            return
        everything = [*variables, *self._settled_variables(optimizer)]
        values, count = list(map(to_array, everything)), len(variables)
        while True:
            weights, state, samples = values[:count], values[count:], self.counter.samples
            values, info = self._take_part(weights, state, variables, flush=True, weight=samples)
            if info.flush:
                break
        for variable, value in zip(everything, values, strict=True):
            variable.assign(value)

    @collective
    def _begin(self, weights: Sequence[HostArray], variables: Sequence[KerasVariable]) -> None:
        begin_fused(weights, variables, self._settings)
        self.counter.begun = True

    @collective
    def _take_part(
        self,
        weights: Sequence[HostArray],
        state: Sequence[HostArray],
        variables: Sequence[KerasVariable],
        flush: bool,
        weight: float,
    ) -> tuple[list[HostArray], StepInfo]:
        """Return the weights and the optimizer's state to continue from."""
        counter, exchange = self.counter, self._exchange
        partial, in_warm_up = exchange.partial, exchange.in_warm_up
        if not counter.begun:
            self._begin(weights, variables)
        own = OwnStep(weight, counter.steps, flush, counter.local_steps)
        name = f"{self._name}_weights"
        results, info = exchange_fused(weights, variables, name, self._settings, own)
        counter.end_exchange(info, partial, exchange.counts_samples)
        if state and info.drifted and not in_warm_up:
            if self._resets:
                self._anew, state = True, self._initial_state
            else:
                settings = GradientSettings(process_set=self._settings.process_set)
                name = f"{self._name}_state"
                owners, own = range(len(state)), OwnStep(weight)
                state, _ = exchange_fused(state, owners, name, settings, own)
        # Copies: variables may outlive the engine's memory, in which the results are.
        return [each.copy() for each in (*results, *state)], info

    def _settled_variables(self, optimizer: keras.optimizers.Optimizer) -> list[KerasVariable]:
        """Return the variables of an optimizer that exchanges average or reset."""
        return _state_variables(optimizer) if self.settles else []

    def counts(self, optimizer: keras.optimizers.Optimizer) -> dict[str, float | None]:
        """Return counts for a checkpoint, by name."""
        self._backend.wait_for_steps()
        self.counter.check_synchronized("exchange_state")
        forgotten: int | None = None
        if self._resets:
            forgotten = self._forgotten_steps
            forgotten = int(to_array(optimizer._iterations)) if self._anew else forgotten
        return {SAMPLES_PER_STEP: self.counter.samples_per_step, FORGOTTEN_STEPS: forgotten}

    def begin_anew(self, counts: Mapping[str, float]) -> None:
        """Go on from equal weights."""
        self._passes, self._samples_of_step = 0, None
        self.counter.begin_anew()
        self.counter.samples_per_step = counts.get(SAMPLES_PER_STEP)
        self._forgotten_steps, self._anew = int(counts.get(FORGOTTEN_STEPS, 0)), False


def _state_variables(optimizer: keras.optimizers.Optimizer) -> list[KerasVariable]:
    """Return the floating point variables of an optimizer that steps change."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    others = [inner._learning_rate, *getattr(inner, "_accumulated_gradients", [])]
    known = {id(variable) for variable in others}
    return [v for v in inner.variables if id(v) not in known and "float" in v.dtype]


def _rate_and_samples(numbers: Sequence[HostArray]) -> tuple[float, float | None]:
    rate, samples = (float(number) for number in numbers)
    return rate, None if samples == _UNKNOWN else samples


def _values(variables: Sequence[KerasVariable]) -> list[BackendTensor]:
    return [keras.ops.convert_to_tensor(variable) for variable in variables]
