"""Weights of PyTorch parameters, exchanged after steps that each rank has taken by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch

from hvdtrain.arrays import Array, HostArray, is_tensor
from hvdtrain.core.bucket_plans import agree_on_change
from hvdtrain.core.gradients.exchange import FilledBucket
from hvdtrain.streams import Streams
from hvdtrain.torch.gradients.planned import Planned, type_change
from hvdtrain.torch.gradients.settings import GradientSettings

__all__ = ["Weights"]


class Weights:
    """Brings the weights of all ranks together when their exchange says so.

    Args:
        parameters: name and parameter, in the order of the model; equal on all ranks.
        settings: equal on all ranks; its exchange is of kind WEIGHTS.
        rate: returns the learning rate.

    Attributes:
        sample_weight: what this rank counts in the next exchanges; None for the plain average.
        steps: how many steps the program has ended.
        together: the weights are those from which ranks part.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        settings: GradientSettings,
        rate: Callable[[], float | None],
    ) -> None:
        self._named, self._settings, self._rate = list(parameters), settings, rate
        self._parameters = [parameter for _, parameter in parameters]
        self.sample_weight: float | None = None
        self.steps = 0
        self._make_plan()

    def _make_plan(self) -> None:
        """Agree on a plan for the parameters as they are (collective)."""
        self._planned = Planned.agree(self._named, self._settings)
        self._release = weakref.finalize(self, setattr, self._planned.channel, "unused", True)
        self._planned.reducer.rate = self._rate
        self.together = True

    def before_step(self) -> None:
        """Show the exchange the weights from which this rank takes steps of its own (local)."""
        if self.together:
            for bucket, streams in self._filled():
                filled = partial(self._planned.exchange.begin, bucket)
                _, read = streams.run_after(streams.mark(), filled)
                streams.wait(read)
            self.together = False

    def after_step(self) -> None:
        """Exchange weights if it is time (collective then)."""
        if self._planned.exchange.due(self.steps):
            self._follow_types()
            self._exchange()
            self.together = True
        self.steps += 1

    def _follow_types(self) -> None:
        """Make the plan anew if parameters have other types now (collective)."""
        change = type_change(self._named, self._planned.types)
        if change:
            agree_on_change(self._planned.channel, self._planned.reducer.name, change)
            self._release()
            self._make_plan()

    def _exchange(self) -> None:
        reducer = self._planned.reducer
        reducer.weight, reducer.steps = self.sample_weight, self.steps
        try:
            for bucket, _ in self._filled():
                for index in bucket.layout.parameters:
                    reducer.ready(index)
                reducer.launch()
            reducer.finish()
            self._read()
        finally:
            reducer.forget()
        reducer.count_step()

    def _buckets(self) -> Iterator[tuple[FilledBucket, Streams]]:
        reducer = self._planned.reducer
        layouts, specs = reducer.plan.buckets, reducer.plan.specs
        for number, streams in enumerate(reducer.streams):
            yield FilledBucket(number, reducer.buffers[number], layouts[number], specs), streams

    def _filled(self) -> Iterator[tuple[FilledBucket, Streams]]:
        """Put the weights into the buckets, one after the other."""
        for bucket, streams in self._buckets():
            for part in bucket.parts:
                weights = self._parameters[part.index].detach()
                streams.fill(weights, _tensor(part.array))
            yield bucket, streams

    def _read(self) -> None:
        """Take the weights out of the buckets."""
        for bucket, streams in self._buckets():
            for part in bucket.parts:
                weights = self._parameters[part.index].detach()
                streams.read(_tensor(part.array), weights)


def _tensor(array: Array) -> torch.Tensor:
    """View an array as a tensor, on its own device whatever the program's default one is."""
    if is_tensor(array):
        return cast("torch.Tensor", array)
    return torch.from_numpy(cast("HostArray", array))
