"""What the ranks exchange for an optimizer now: its gradients, or its weights after local steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.gradient_settings import register_weighted
from hvdtrain.core.gradients.exchange import (
    SAMPLES_PER_STEP,
    FilledBucket,
    InnerState,
    Kind,
    LocalSteps,
    SavedExchange,
    StepInfo,
)
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.core.membership import Follower
from hvdtrain.core.objects import allgather_object, together
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.averaged_gradients import Gradients
from hvdtrain.torch.buckets import ParameterSettings
from hvdtrain.torch.operations.parts import check_reduced, parameters_of, rate_of, require_values
from hvdtrain.torch.operations.routes import is_communicated
from hvdtrain.torch.operations.watched_models import find_others, monitor
from hvdtrain.torch.parameters import ClaimedParameters
from hvdtrain.types import ReduceOp

# Number of a parameter, and name of a tensor of its state.
_Name = tuple[int, str]
_COUNT = "step"  # which torch keeps as a floating point number


@collective
def settle_states(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    inner_state: InnerState,
    weight: float,
    process_set: ProcessSet,
) -> None:
    """Keep, average or forget the states of the ranks' optimizers (collective if averaged).

    The average of a tensor is s = sum_r(c_r s_r) / sum_r(c_r) over the ranks that have it. Counts
    of steps are not averaged.
    """
    if inner_state is InnerState.RESET:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    elif inner_state is InnerState.AVERAGE:
        _average(optimizer, parameters, weight, process_set)


@collective
def _average(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    weight: float,
    process_set: ProcessSet,
) -> None:
    own = _tensors(optimizer, parameters)
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
    channel = process_set.channel()
    gathered = allgather_object((weight, kinds), "states of optimizers", channel)
    everywhere = {name: kind for _, theirs in gathered for name, kind in theirs.items()}
    totals = {name: sum(each for each, theirs in gathered if name in theirs) for name in everywhere}
    names = sorted(name for name, total in totals.items() if total > 0)
    if not names:
        return
    from hvdtrain.torch.operations.allreduce import grouped_allreduce

    sums = grouped_allreduce(
        [
            own[name] * (weight / totals[name])
            if name in own
            else torch.zeros(
                everywhere[name][0], dtype=everywhere[name][1], device=parameters[name[0]].device
            )
            for name in names
        ],
        name="states of optimizers",
        op=ReduceOp.SUM,
        process_set=process_set,
    )
    for name, tensor in zip(names, sums, strict=True):
        if name in own:
            own[name].copy_(tensor)


def _tensors(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> dict[_Name, torch.Tensor]:
    """Return the tensors of a state that are averaged."""
    return {
        (index, name): value
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and name != _COUNT
    }


class Weights(ClaimedParameters):
    """Exchanges the weights of all ranks when their exchange is due, or when all ask for it.

    A rank counts in an exchange with the samples that it had since all weights were equal, or with
    its steps since then if no rank was given sample weights.
    """

    @collective
    def prepare_step(self) -> None:
        """Prepare for a step (local; collective before the first one if samples are counted)."""
        check_reduced(self._optimizer, self.parameters)
        self.check_claim()
        self._check_trained()
        counts = self.buckets.exchange.counts_samples and self.counter.samples_per_step is None
        if counts and self.weight is not None:
            self._exchange(flush=False, weight=self.weight)
        self._begin()

    def _check_trained(self) -> None:
        # An outer momentum would move a frozen parameter, and an average round it.
        for name, parameter in self._named:
            if not parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} is frozen now, and exchange "
                    f"{self.buckets.exchange.spec!r} would change it: call flush(), and wrap the "
                    "optimizer again after changing requires_grad"
                )

    def _begin(self) -> None:
        """Pass the weights that all ranks have in common to the exchange, if new."""
        if not self.counter.begun:
            self.check_kept(parameter.grad is not None for parameter in self.parameters)
            buckets, plan = self.buckets, self.buckets.plan
            for number in self._fill():
                memory, streams = buckets.buffers[number], buckets.streams[number]
                filled = FilledBucket(number, memory, plan.buckets[number], plan.specs)
                begin = partial(buckets.exchange.begin, filled)
                _, read = streams.run_after(streams.mark(), begin)
                streams.wait(read)
            self.counter.begun = True

    @collective
    def end_step(self) -> None:
        """Count a step, and exchange the weights if the exchange is due (collective if so)."""
        steps = self.counter.count(self.weight, rate_of(self._optimizer))
        if self.buckets.exchange.due(steps):
            self._exchange(flush=False, weight=self.counter.samples)

    @collective
    def flush(self) -> None:
        """Make all weights equal now; until its end a rank takes part in the others' exchanges."""
        while not self._exchange(flush=True, weight=self.counter.samples).flush:
            pass

    @collective
    def _exchange(self, flush: bool, weight: float) -> StepInfo:
        """Exchange the weights of all ranks; return what they know about it."""
        if self.buckets.changed_dtypes():
            self._remake_plan()
        self._begin()
        exchange, reducer = self.buckets.exchange, self.buckets
        some, in_warm_up = exchange.partial, exchange.in_warm_up
        rate = rate_of(self._optimizer) if exchange.uses_rate else None
        own = OwnStep(weight, self.counter.steps, flush, self.counter.local_steps, rate)
        step = reducer.step
        try:
            for number in self._fill():
                for index in reducer.plan.buckets[number].parameters:
                    reducer.step.mark_ready(index)
                if reducer.launch():
                    reducer.submit(own)
            reducer.finish(own)
            for index in range(len(self.parameters)):
                reducer.read(index)
        finally:
            reducer.forget()
        reducer.count_step()
        assert step.info is not None
        self.counter.end_exchange(step.info, some, exchange.counts_samples)
        if step.info.drifted and not in_warm_up:
            process_set = self._settings.process_set
            settle_states(
                self._optimizer, self.parameters, exchange.inner_state, weight, process_set
            )
        return step.info

    def _fill(self) -> Iterator[int]:
        """Copy the weights into the buckets, and yield the number of each filled one."""
        for number, bucket in enumerate(self.buckets.plan.buckets):
            for index in bucket.parameters:
                self.buckets.fill(index)
            yield number


class Exchanged(Follower):
    """Exchanges the gradients of an optimizer, or its weights after local steps.

    An exchange of weights may begin with averages of gradients, as post-local SGD: at its switch
    the plan of gradients makes way for one of weights.
    """

    @collective
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        settings: ParameterSettings,
    ) -> None:
        self._optimizer, self.names, self.settings = optimizer, names, settings
        self._scaler: torch.amp.GradScaler | None = None
        self.gradients: Gradients | None = None
        self.weights: Weights | None = None
        with context.alone_if_newcomer():
            self._plan()
        register_weighted(self)
        if self.gradients is not None:
            context.current().followers.add(self, settings.process_set.channel().ranks)

    @collective
    def _plan(self) -> None:
        """Plan the exchange of gradients or weights on the ranks that take part."""
        monitor.note_wrapped(self._optimizer)
        settings = self.settings
        if not settings.process_set.included():
            return
        trainable = [
            (self.names[id(p)], p) for p in parameters_of(self._optimizer) if p.requires_grad
        ]
        _require_reducible(trainable, settings.process_set.channel())
        if self.exchanges_weights:
            self.gradients = None
            self.weights = Weights(self._optimizer, trainable, settings)
        else:
            self.weights = None
            if settings.exchange is not None and settings.exchange.first is not None:
                settings = replace(settings, exchange=settings.exchange.first)
            self.gradients = Gradients(self._optimizer, trainable, settings, self._scaler)

    def has(self, parameters: Set[int]) -> bool | None:
        """Return whether ranks exchange one of these; see Weighted."""
        planned = self._planned
        if planned is None or planned.lost:
            return False
        if not parameters.isdisjoint(planned.names):
            return True
        return None if planned.world is context.current() else False

    @property
    def _planned(self) -> Gradients | Weights | None:
        """What this rank exchanges; None if it does not take part."""
        return self.gradients or self.weights

    @property
    def exchanges_weights(self) -> bool:
        """Whether the exchange wants weights now, instead of gradients."""
        exchange = self.settings.exchange
        return exchange is not None and exchange.kind is Kind.WEIGHTS and exchange.first is None

    def interrupt(self) -> None:
        if self.gradients is not None:
            self.gradients.interrupt()

    def state(self) -> object:
        weights = [p.detach().cpu() for p in parameters_of(self._optimizer)]
        return weights, self._optimizer.state_dict()

    def take(self, state: object) -> None:
        weights, optimizer_state = cast("tuple[list[torch.Tensor], dict[str, Any]]", state)
        with torch.no_grad():
            for parameter, weight in zip(parameters_of(self._optimizer), weights, strict=True):
                parameter.copy_(weight)
        self._optimizer.load_state_dict(optimizer_state)

    @property
    def passes(self) -> int:
        """Number of backward passes accumulated before a reduction."""
        return self.settings.passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self.settings = replace(self.settings, passes=passes)
        if self.gradients is not None:
            self.gradients.passes = passes

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the program, whose factor the gradients have."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        if self.gradients is not None:
            self.gradients.scaler = scaler

    @property
    def weight(self) -> float | None:
        """Weight of this rank in the average of the next steps; None for the plain average."""
        return None if self._planned is None else self._planned.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if self._planned is not None:
            self._planned.weight = weight

    @property
    def steps(self) -> int:
        """Number of steps that the program has completed; 0 on a rank that does not take part."""
        return 0 if self._planned is None else self._planned.counter.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        if self._planned is not None:
            self._planned.counter.steps = steps

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all ranks were equal."""
        return self.weights is None or self.weights.counter.synchronized

    def check_synchronized(self, caller: str) -> None:
        if self.weights is not None:
            self.weights.counter.check_synchronized(caller)

    @collective
    def end_gradient_step(self) -> None:
        """Let averages of gradients end if they have been enough (collective if so)."""
        exchange = self.settings.exchange
        info = None if self.gradients is None else self.gradients.info
        if info is not None and exchange is not None and exchange.first is not None:
            rate = rate_of(self._optimizer)
            exchange.due(LocalSteps(1, None, info.step + 1, rate, info.whole))
            self._follow_exchange()

    def save(self) -> SavedExchange:
        """Return the state of the exchange and the number of steps."""
        self.check_synchronized("exchange_state")
        samples = None if self.weights is None else self.weights.counter.samples_per_step
        return self.settings.save_exchange(self.steps, {SAMPLES_PER_STEP: samples})

    @collective
    def load(self, state: SavedExchange) -> None:
        """Restore the result of save() (local; collective if it is from after a switch)."""
        self.steps, counts = self.settings.load_exchange(state)
        self._follow_exchange()
        if self.weights is not None:
            self.weights.counter.begin_anew()
            self.weights.counter.samples_per_step = counts.get(SAMPLES_PER_STEP)

    @collective
    def _follow_exchange(self) -> None:
        """Exchange what the exchange wants now (collective if that has changed)."""
        if self._planned is not None and self.exchanges_weights != (self.weights is not None):
            self.replan(self.names)

    @collective
    def replan(self, names: Mapping[int, str]) -> None:
        """Plan again, and continue with the same steps and sample weight."""
        steps, weight = self.steps, self.weight
        self.names = names
        self._plan()
        self.steps, self.weight = steps, weight


@collective
def _require_reducible(
    trainable: Sequence[tuple[str, torch.nn.Parameter]], channel: Channel
) -> None:
    """Raise on all ranks why one of them has no gradient to reduce for a parameter."""
    title = context.current().topology.title
    with together("DistributedOptimizer", channel):
        others = find_others(parameter for _, parameter in trainable)
        for name, parameter in trainable:
            subject = f"{title} DistributedOptimizer: {name!r}"
            require_values(parameter, subject)
            if id(parameter) in others:
                raise UnsupportedError(f"{subject} {others[id(parameter)]}")
            if parameter.layout is not torch.strided or not is_communicated(parameter.dtype):
                kind = f"{parameter.layout} of {parameter.dtype}".replace("torch.", "")
                raise UnsupportedError(
                    f"{subject} is {kind}, whose gradient cannot be reduced: freeze it, or train a "
                    "dense parameter of a wider type"
                )
