"""The exchange of the weights of PyTorch parameters after local steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch

from hvdtrain.arrays import Array, HostArray, is_tensor
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.bucket_plans import agree_on_change
from hvdtrain.core.gradients.exchange import FilledBucket, InnerState, StepInfo
from hvdtrain.core.gradients.step_info import OwnStep, StepCounter
from hvdtrain.core.objects import allgather_object
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.streams import Streams
from hvdtrain.torch.gradients.buckets import ParameterBuckets, describe_dtype_change
from hvdtrain.torch.gradients.claims import Claim
from hvdtrain.torch.gradients.views import ParameterSettings
from hvdtrain.torch.operations.allreduce import grouped_allreduce
from hvdtrain.torch.tensors.parts import check_reduced, rate_of
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
    sums = grouped_allreduce(
        [
            own[name] * (weight / totals[name])
            if name in own
            else _zeros(everywhere[name], parameters[name[0]].device)
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
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != _COUNT
    }


def _zeros(kind: tuple[tuple[int, ...], torch.dtype], device: torch.device) -> torch.Tensor:
    shape, dtype = kind
    return torch.zeros(shape, dtype=dtype, device=device)


class Weights:
    """Exchanges the weights of all ranks when their exchange is due, or when all ask for it.

    A rank counts in an exchange with the samples that it had since all weights were equal, or with
    its steps since then if no rank was given sample weights.
    """

    @collective
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ParameterSettings,
    ) -> None:
        self._optimizer, self._named, self._settings = optimizer, list(parameters), settings
        self._parameters = [parameter for _, parameter in parameters]
        self.weight: float | None = None
        self.counter = StepCounter()
        self.claim = Claim(parameters)
        self._make_plan()

    @collective
    def _make_plan(self) -> None:
        self.world = context.current()
        self._buckets = ParameterBuckets.agree(self._named, self._settings)
        self._release = weakref.finalize(self, setattr, self._buckets.channel, "unused", True)

    @collective
    def before_step(self) -> None:
        """Prepare for a step (local; collective before the first one if samples are counted)."""
        check_reduced(self._optimizer, self._parameters)
        self.claim.check()
        self._check_trained()
        counts = self._buckets.exchange.counts_samples and self.counter.samples_per_step is None
        if counts and self.weight is not None:
            self._exchange(flush=False, weight=self.weight)
        self._begin()

    def _check_trained(self) -> None:
        # An outer momentum would move a frozen parameter, and an average round it.
        for name, parameter in self._named:
            if not parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} is frozen now, and exchange "
                    f"{self._buckets.exchange.spec!r} would change it: call flush(), and wrap the "
                    "optimizer again after changing requires_grad"
                )

    def _begin(self) -> None:
        """Pass the weights that all ranks have in common to the exchange, if new."""
        if not self.counter.begun:
            for bucket, streams in self._filled():
                filled = partial(self._buckets.exchange.begin, bucket)
                _, read = streams.run_after(streams.mark(), filled)
                streams.wait(read)
            self.counter.begun = True

    @collective
    def after_step(self) -> None:
        """Count a step, and exchange the weights if the exchange is due (collective if so)."""
        steps = self.counter.count(self.weight, rate_of(self._optimizer))
        if self._buckets.exchange.due(steps):
            self._exchange(flush=False, weight=self.counter.samples)

    @collective
    def flush(self) -> None:
        """Make all weights equal now; until its end a rank takes part in the others' exchanges."""
        while not self._exchange(flush=True, weight=self.counter.samples).flush:
            pass

    @collective
    def _follow_dtypes(self) -> None:
        """Make a new plan if dtypes of parameters have changed."""
        change = describe_dtype_change(self._named, self._buckets.dtypes)
        if change:
            agree_on_change(self._buckets.channel, self._buckets.reducer.name, change)
            self._release()
            self._make_plan()

    @collective
    def _exchange(self, flush: bool, weight: float) -> StepInfo:
        """Exchange the weights of all ranks; return what they know about it."""
        self._follow_dtypes()
        self._begin()
        exchange, reducer = self._buckets.exchange, self._buckets.reducer
        some, in_warm_up = exchange.partial, exchange.in_warm_up
        rate = rate_of(self._optimizer) if exchange.uses_rate else None
        own = OwnStep(
            weight,
            self.counter.steps,
            flush=flush,
            local_steps=self.counter.local_steps,
            rate=rate,
        )
        step = reducer.step
        try:
            for bucket, _ in self._filled():
                for index in bucket.layout.parameters:
                    reducer.ready(index)
                if reducer.launch():
                    reducer.submit(own)
            reducer.finish(own)
            self._read()
        finally:
            reducer.forget()
        reducer.count_step()
        assert step.info is not None
        self.counter.end_exchange(step.info, some, exchange.counts_samples)
        if step.info.drifted and not in_warm_up:
            process_set = self._settings.process_set
            settle_states(
                self._optimizer, self._parameters, exchange.inner_state, weight, process_set
            )
        return step.info

    def _bucket_views(self) -> Iterator[tuple[FilledBucket, Streams]]:
        reducer = self._buckets.reducer
        layouts, specs = reducer.plan.buckets, reducer.plan.specs
        for number, streams in enumerate(reducer.streams):
            yield FilledBucket(number, reducer.buffers[number], layouts[number], specs), streams

    def _filled(self) -> Iterator[tuple[FilledBucket, Streams]]:
        """Copy the weights into the buckets and yield each filled bucket."""
        for bucket, streams in self._bucket_views():
            for part in bucket.parts:
                weights = self._parameters[part.index].detach()
                streams.fill(weights, _tensor(part.array))
            yield bucket, streams

    def _read(self) -> None:
        """Copy the weights back from the buckets."""
        for bucket, streams in self._bucket_views():
            for part in bucket.parts:
                weights = self._parameters[part.index].detach()
                streams.read(_tensor(part.array), weights)


def _tensor(array: Array) -> torch.Tensor:
    """View an array as a tensor on its own device, whatever the default device is."""
    if is_tensor(array):
        return cast("torch.Tensor", array)
    return torch.from_numpy(cast("HostArray", array))
