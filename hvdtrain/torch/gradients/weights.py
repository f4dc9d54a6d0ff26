"""The exchange of the weights of PyTorch parameters after local steps."""

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
from hvdtrain.torch.gradients.buckets import ParameterBuckets, describe_dtype_change
from hvdtrain.torch.gradients.settings import ParameterSettings

__all__ = ["Weights"]


class Weights:
    """Exchanges the weights of all ranks in the steps in which their exchange is due.

    Args:
        parameters: name and parameter, in the order of the model; equal on all ranks.
        settings: settings, equal on all ranks; the exchange is of kind WEIGHTS.
        rate: function that returns the learning rate.

    Attributes:
        sample_weight: weight of this rank in the next exchanges; None for the plain average.
        steps: number of steps that the program has completed.
        synchronized: whether no local step has been taken since the last exchange.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        settings: ParameterSettings,
        rate: Callable[[], float | None],
    ) -> None:
        self._named, self._settings, self._rate = list(parameters), settings, rate
        self._parameters = [parameter for _, parameter in parameters]
        self.sample_weight: float | None = None
        self.steps = 0
        self._make_plan()

    def _make_plan(self) -> None:
        """Agree on a plan for the current parameters (collective)."""
        self._buckets = ParameterBuckets.agree(self._named, self._settings)
        self._release = weakref.finalize(self, setattr, self._buckets.channel, "unused", True)
        self._buckets.reducer.rate = self._rate
        self.synchronized = True

    def before_step(self) -> None:
        """Pass the weights before the first local step to the exchange (local)."""
        if self.synchronized:
            for bucket, streams in self._filled():
                filled = partial(self._buckets.exchange.begin, bucket)
                _, read = streams.run_after(streams.mark(), filled)
                streams.wait(read)
            self.synchronized = False

    def after_step(self) -> None:
        """Exchange the weights if the exchange is due (collective if so)."""
        if self._buckets.exchange.due(self.steps):
            self._follow_dtypes()
            self._exchange()
            self.synchronized = True
        self.steps += 1

    def _follow_dtypes(self) -> None:
        """Make a new plan if dtypes of parameters have changed (collective)."""
        change = describe_dtype_change(self._named, self._buckets.dtypes)
        if change:
            agree_on_change(self._buckets.channel, self._buckets.reducer.name, change)
            self._release()
            self._make_plan()

    def _exchange(self) -> None:
        reducer = self._buckets.reducer
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
