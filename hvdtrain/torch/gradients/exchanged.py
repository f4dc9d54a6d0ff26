"""What the ranks exchange for an optimizer now: its gradients, or its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context, sample_weights
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.exchanges.state import (
    SAMPLES_PER_STEP,
    SavedExchange,
    load_exchange,
    save_exchange,
)
from hvdtrain.core.gradients.exchange import Kind, LocalSteps
from hvdtrain.core.membership.recruiter import Follower
from hvdtrain.core.objects import together
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.gradients.gradients import Gradients
from hvdtrain.torch.gradients.views import ParameterSettings
from hvdtrain.torch.gradients.weights import Weights
from hvdtrain.torch.operations.divergence import note_wrapped
from hvdtrain.torch.tensors.parts import parameters_of, rate_of, require_values
from hvdtrain.torch.tensors.routes import is_communicated


class LossScale:
    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None

    def __call__(self) -> float:
        """Return the factor; 1 without a loss scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())


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
        self.loss_scale = LossScale()
        self.gradients: Gradients | None = None
        self.weights: Weights | None = None
        with context.alone_if_newcomer():
            self._plan()
        sample_weights.register(self)
        if self.gradients is not None:
            context.current().followers.add(self, settings.process_set.channel().ranks)

    @collective
    def _plan(self) -> None:
        """Plan the exchange of gradients or weights on the ranks that take part."""
        note_wrapped(self._optimizer)
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
            rate = partial(rate_of, self._optimizer)
            self.gradients = Gradients(trainable, settings, rate, self.loss_scale)

    def has(self, parameters: Set[int]) -> bool | None:
        """Return whether ranks exchange one of these; see sample_weights."""
        exchanged = self.gradients or self.weights
        if exchanged is None or exchanged.claim.lost:
            return False
        if not parameters.isdisjoint(exchanged.claim.names):
            return True
        return None if exchanged.world is context.current() else False

    @property
    def weight(self) -> float | None:
        """What this rank counts with; see sample_weights."""
        return self.sample_weight

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
    def sample_weight(self) -> float | None:
        """Weight of this rank in the average of the next steps; None for the plain average."""
        exchanged = self.gradients or self.weights
        return None if exchanged is None else exchanged.weight

    @sample_weight.setter
    def sample_weight(self, weight: float | None) -> None:
        exchanged = self.gradients or self.weights
        if exchanged is not None:
            exchanged.weight = weight

    @property
    def steps(self) -> int:
        """Number of steps that the program has completed; 0 on a rank that does not take part."""
        if self.weights is not None:
            return self.weights.counter.steps
        return 0 if self.gradients is None else self.gradients.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        if self.weights is not None:
            self.weights.counter.steps = steps
        if self.gradients is not None:
            self.gradients.steps = steps

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
        counts = {SAMPLES_PER_STEP: samples}
        ranks = self.settings.process_set.size() or 0
        return save_exchange(self.settings.make_exchange(), self.steps, ranks, counts)

    @collective
    def load(self, state: SavedExchange) -> None:
        """Restore the result of save() (local; collective if it is from after a switch)."""
        members = self.settings.process_set
        first = members.included() and members.rank() == 0
        exchange = self.settings.make_exchange()
        self.steps, counts = load_exchange(exchange, state, members.size() or 0, first)
        self._follow_exchange()
        if self.weights is not None:
            self.weights.counter.begin_anew()
            self.weights.counter.samples_per_step = counts.get(SAMPLES_PER_STEP)

    @collective
    def _follow_exchange(self) -> None:
        """Exchange what the exchange wants now (collective if that has changed)."""
        planned = self.gradients or self.weights
        if planned is not None and self.exchanges_weights != (planned is self.weights):
            self.replan(self.names)

    @collective
    def replan(self, names: Mapping[int, str]) -> None:
        """Plan again, and continue with the same steps and sample weight."""
        steps, weight = self.steps, self.sample_weight
        self.names = names
        self._plan()
        self.steps, self.sample_weight = steps, weight


@collective
def _require_reducible(
    trainable: Sequence[tuple[str, torch.nn.Parameter]], channel: Channel
) -> None:
    """Raise on all ranks why one of them has no gradient to reduce for a parameter."""
    title = context.current().topology.title
    with together("DistributedOptimizer", channel):
        for name, parameter in trainable:
            subject = f"{title} DistributedOptimizer: {name!r}"
            require_values(parameter, subject)
            if parameter.layout is not torch.strided or not is_communicated(parameter.dtype):
                kind = f"{parameter.layout} of {parameter.dtype}".replace("torch.", "")
                raise UnsupportedError(
                    f"{subject} is {kind}, whose gradient cannot be reduced: freeze it, or train a "
                    "dense parameter of a wider type"
                )
