"""Gradients of PyTorch parameters, reduced while the backward pass runs."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from hvdtrain.core import context
from hvdtrain.core.channel import Channel
from hvdtrain.core.plan import ParameterSpec, Plan
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.core.reducer import (
    GradientReducer,
    agree_on_plan,
    open_plan_channel,
    replan,
    take_layout,
)
from hvdtrain.errors import HvdtrainError
from hvdtrain.tensors.torch import as_buffer, dtype_of, from_buffer, is_plain, wire_type
from hvdtrain.torch.compression import Compression, Compressor
from hvdtrain.torch.ops import sparse_allreduce_async
from hvdtrain.types import DType, ReduceOp

__all__ = ["GradientSettings", "Gradients", "TooManyPassesError"]

# From there on a gradient does not stay in the caches until it is reduced.
_LARGE_BYTES = 256 << 10


class TooManyPassesError(HvdtrainError, AssertionError):
    """Gradients were computed more often than backward_passes_per_step before step()."""


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are reduced.

    Attributes:
        op: AVERAGE or SUM.
        process_set: the ranks that take part.
        compression: how gradients are rounded before they are added.
        passes: backward passes that add up locally before a reduction.
        predivide: the average is (1/predivide before, predivide/size after) the sum.
        groups: indices of parameters that are reduced together.
        sparse_as_dense: make sparse gradients dense, instead of gathering their elements.
    """

    op: ReduceOp
    process_set: ProcessSet
    compression: type[Compressor] = Compression.none
    passes: int = 1
    predivide: float = 1.0
    groups: tuple[tuple[int, ...], ...] = ()
    sparse_as_dense: bool = False


class Gradients:
    """Hooks on parameters that hand their gradients to a reducer.

    After backward `parameter.grad` of a CPU parameter is a view of its bucket, which holds the
    reduced gradient; gradients of other devices are copied, those of half types where the engine
    does not add them in float32, and those that backward(create_graph=True) computed.

    Args:
        parameters: name and parameter, in the order of the model; equal on all ranks.
        settings: equal on all ranks.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], settings: GradientSettings
    ) -> None:
        self._settings = settings
        self.passes = settings.passes
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        here, parent = context.current(), settings.process_set.channel()
        halves = parent.communicator.capabilities.halves
        specs = [_spec(name, parameter, halves) for name, parameter in parameters]
        self._plan = agree_on_plan(specs, parent, settings.groups)
        channel = open_plan_channel(parent)
        self.reducer = GradientReducer(
            channel,
            self._plan,
            settings.op,
            here.blocked,
            numbers=3 * len(specs) + 1,
            prescale=1.0 / settings.predivide,
            postscale=settings.predivide,
        )
        # In which order gradients come, until the plan has been made again from it.
        self._arrivals: list[int] | None = []
        self._cut_views()
        self._lock = threading.Lock()  # each GPU has a backward thread of its own
        self._callback_queued = False
        self._copies: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._reset()
        hooks = [self._hook(index) for index in range(len(parameters))]
        weakref.finalize(self, _release, hooks, channel)

    def _cut_views(self) -> None:
        self._views: dict[int, torch.Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        for number, bucket in enumerate(self._plan.buckets):
            memory = from_buffer(self.reducer.buffers[number])
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                spec = self._plan.specs[index]
                self._views[index] = torch.as_strided(memory, spec.shape, spec.strides, start)
                self._bucket_of[index] = number

    def _reset(self) -> None:
        self._passes: Counter[int] = Counter()
        self._sparse: dict[int, torch.Tensor] = {}
        self._missing = [len(bucket.parameters) for bucket in self._plan.buckets]
        self._delivered = 0
        if self._arrivals is not None:
            self._arrivals = []

    def _hook(self, index: int) -> RemovableHandle:
        reference = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            gradients = reference()
            if gradients is not None:
                gradients._on_gradient(index)

        return self._parameters[index].register_post_accumulate_grad_hook(hook)

    @property
    def open(self) -> bool:
        """Whether a gradient has come since the last finish()."""
        return bool(self._passes)

    @property
    def layout(self) -> dict[str, Any] | None:
        """The layout of the plan that stays; None before the first step has shown it."""
        return None if self._arrivals is not None else self._plan.layout

    def use_layout(self, layout: Mapping[str, Any] | None) -> None:
        """Take the layout that the first rank has for the plan that stays (collective).

        Raises:
            ValueError: it is a layout of other parameters.
            RuntimeError: a step has begun.
        """
        if self.open:
            raise RuntimeError("a bucket plan cannot be taken between backward() and step()")
        plan = take_layout(self._plan, layout, self._settings.process_set.channel())
        if plan is not self._plan:
            self._use_plan(plan)
            self._reset()

    def check_covers(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Raise RuntimeError if one of `parameters` needs a gradient that nobody reduces."""
        hooked = {id(parameter) for parameter in self._parameters}
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad and id(parameter) not in hooked:
                raise RuntimeError(
                    f"parameter {number} of the optimizer (shape {tuple(parameter.shape)}) was "
                    "frozen when DistributedOptimizer was made, and is not now: wrap the "
                    "optimizer again after changing requires_grad"
                )

    def _on_gradient(self, index: int) -> None:
        with self._lock:
            if self._passes[index] >= self.passes:
                self._start_over(index)
            self._passes[index] += 1
            if self._passes[index] == self.passes:
                self._take(index)
                if self._arrivals is not None:
                    self._arrivals.append(index)
                self._missing[self._bucket_of[index]] -= 1
                if not any(self._missing):
                    self._note_numbers()
                while not self.reducer.complete and self._missing[self.reducer.launched] == 0:
                    self.reducer.launch()
            if not self._callback_queued:
                self._callback_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _start_over(self, index: int) -> None:
        # A step that was skipped after a complete backward pass (a loss scaler does that)
        # leaves fresh gradients behind; anything else would be reduced twice.
        if not self.reducer.complete or self._is_reduced(index):
            raise TooManyPassesError(
                f"the gradient of {self._names[index]!r} was computed more than "
                f"backward_passes_per_step={self.passes} times before step(): call "
                "optimizer.step() or optimizer.zero_grad() in between, or increase it"
            )
        self._finish()

    def _is_reduced(self, index: int) -> bool:
        """Tell whether a parameter's gradient is the one that was reduced last."""
        gradient = self._parameters[index].grad
        if gradient is None:
            return False
        copy = self._copies.get(index)
        return self._holds(index, self._views[index]) or (
            copy is not None and gradient.data_ptr() == copy.data_ptr()
        )

    def _holds(self, index: int, view: torch.Tensor) -> bool:
        """Tell whether a parameter's gradient is this view of its bucket."""
        gradient = self._parameters[index].grad
        return (
            gradient is not None
            and not gradient.is_sparse
            and gradient.data_ptr() == view.data_ptr()
        )

    def _lies_in_bucket(self, index: int) -> bool:
        parameter, view = self._parameters[index], self._views[index]
        return parameter.device.type == "cpu" and parameter.dtype == view.dtype

    def _take(self, index: int) -> None:
        """Bring a gradient into its bucket."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            if not self._settings.sparse_as_dense:
                self._sparse[index] = gradient
                gradient = None
            else:
                gradient = gradient.to_dense()
        if gradient is None:
            view.zero_()
            return
        compressed, _ = self._settings.compression.compress(gradient)
        if compressed.data_ptr() != view.data_ptr():
            self._copy(compressed.detach(), view)
        # One that can be differentiated again (create_graph) stays where its graph leads to.
        if self._lies_in_bucket(index) and not gradient.requires_grad:
            parameter.grad = view

    def _copy(self, gradient: torch.Tensor, view: torch.Tensor) -> None:
        equal = gradient.dtype == view.dtype and view.is_contiguous() and is_plain(gradient)
        if equal and view.nbytes >= _LARGE_BYTES:
            self.reducer.put(as_buffer(gradient), as_buffer(view))
        else:
            view.copy_(gradient)

    def _after_backward(self) -> None:
        self._callback_queued = False
        self.reducer.wait_a_while()
        self._deliver(self.reducer.reduced)

    def _deliver(self, count: int) -> None:
        """Copy gradients of the first buckets back to where they do not lie in their bucket."""
        for bucket in self._plan.buckets[self._delivered : count]:
            for index in bucket.parameters:
                parameter, view = self._parameters[index], self._views[index]
                gradient = parameter.grad
                if gradient is None or self._holds(index, view) or index in self._sparse:
                    continue
                if gradient.is_sparse:
                    gradient = parameter.grad = torch.empty_like(parameter)
                gradient.detach().copy_(view)
                self._copies[index] = gradient
        self._delivered = count

    def finish(self) -> None:
        """End the step (collective): reduce what is missing, with zeros where this rank has none.

        A parameter that no rank used keeps its gradient None.
        """
        self._callback_queued = False  # a backward pass that failed has left it set
        with self._lock:
            if self._plan.buckets:
                self._finish()

    def _finish(self) -> None:
        try:
            self._reduce_rest()
        finally:
            self.reducer.forget()
            self._reset()

    def _reduce_rest(self) -> None:
        count = len(self._parameters)
        late = [index for index in range(count) if self._passes[index] < self.passes]
        absent = [index for index in late if self._parameters[index].grad is None]
        for index in late:
            self._take(index)
        if late and not self.reducer.complete:
            self._note_numbers(absent)
        while not self.reducer.complete:
            self.reducer.launch()
        summed = self.reducer.finish()
        self._deliver(len(self._plan.buckets))
        for index in absent:
            if summed[index]:
                parameter = self._parameters[index]
                parameter.grad = self._views[index].to(parameter.device, parameter.dtype)
        self._reduce_sparse([i for i in range(count) if summed[count + i]])
        self._make_plan_again(summed[2 * count :])

    def _note_numbers(self, absent: Sequence[int] = ()) -> None:
        """Say what the ranks have to add up: who used which parameter, and in which order.

        For each parameter 1 where this rank has a gradient, and 1 where it is sparse; then,
        until the plan has been made again, its place in the order of arrival, and 1.
        """
        count = len(self._parameters)
        used, sparse, places = np.split(self.reducer.numbers[:-1], 3)
        used[:] = 1
        used[list(absent)] = 0
        sparse[list(self._sparse)] = 1
        if self._arrivals is not None:
            places[:] = count
            places[self._arrivals] = range(len(self._arrivals))
            self.reducer.numbers[-1] = 1

    def _make_plan_again(self, places: Sequence[int]) -> None:
        """Follow the order in which gradients really came, once, if all ranks are there."""
        if self._arrivals is None or places[-1] != len(self._settings.process_set.channel().ranks):
            return
        self._use_plan(replan(self._plan, places[:-1]))

    def _use_plan(self, plan: Plan) -> None:
        """Reduce by a plan that stays, from the next step on."""
        self._arrivals = None
        self._plan = plan
        kept = {
            index: view.clone() for index, view in self._views.items() if self._holds(index, view)
        }
        self.reducer.use_plan(self._plan)
        self._cut_views()
        for index, gradient in kept.items():
            self._parameters[index].grad = self._views[index].copy_(gradient)

    def _reduce_sparse(self, indices: Sequence[int]) -> None:
        settings = self._settings
        if indices and self.reducer.sample_weight is not None:
            raise ValueError(
                f"the gradient of {self._names[indices[0]]!r} is sparse, which does not go with "
                "sample_weight: use sparse_as_dense=True"
            )
        for index in indices:
            parameter = self._parameters[index]
            own = self._sparse.get(index)
            if own is None:
                own = torch.sparse_coo_tensor(
                    torch.empty((1, 0), dtype=torch.int64),
                    torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype),
                    parameter.shape,
                    check_invariants=True,
                ).to(parameter.device)
            name = f"sparse gradient of {self._names[index]}"
            handle = sparse_allreduce_async(own.coalesce(), name, settings.op, settings.process_set)
            parameter.grad = handle.wait().coalesce()


def _spec(name: str, parameter: torch.nn.Parameter, halves: bool) -> ParameterSpec:
    # A gradient in the memory order of its parameter lets the optimizer run through both.
    dense = parameter if _fills_its_memory(parameter) else parameter.detach().contiguous()
    own = dtype_of(parameter)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        strides=tuple(dense.stride()),
        dtype=own if halves else DType(str(wire_type(parameter.dtype)).removeprefix("torch.")),
        kind=own.value,
        device=parameter.device.type,
    )


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _release(hooks: list[RemovableHandle], channel: Channel) -> None:
    channel.unused = True
    for hook in hooks:
        hook.remove()
