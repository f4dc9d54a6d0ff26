"""Gradients of PyTorch parameters, reduced while the backward pass runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch.utils.hooks import RemovableHandle

from hvdtrain.core import context
from hvdtrain.core.plan import ParameterSpec
from hvdtrain.core.reducer import GradientReducer, agree_on_plan
from hvdtrain.tensors.torch import dtype_of, from_buffer
from hvdtrain.types import ReduceOp

__all__ = ["Gradients"]


class Gradients:
    """Hooks on parameters that hand their gradients to a reducer.

    After backward `parameter.grad` of a CPU parameter is a view of its bucket, which holds the
    reduced gradient; gradients of other devices are copied through host memory.

    Args:
        parameters: name and parameter, in the order of the model; equal on all ranks.
        op: AVERAGE or SUM.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]], op: ReduceOp) -> None:
        world = context.current()
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._plan = agree_on_plan([_spec(name, parameter) for name, parameter in parameters])
        channel = world.open_channel(range(world.topology.size))
        assert channel is not None  # every rank is a member
        self.reducer = GradientReducer(channel, self._plan, op, world.blocked)
        self._views: dict[int, torch.Tensor] = {}
        self._bucket_of: dict[int, int] = {}
        self._cut_views()
        self._lock = threading.Lock()  # each GPU has a backward thread of its own
        self._reset()
        hooks = [self._hook(index) for index in range(len(parameters))]
        weakref.finalize(self, _release, hooks, self.reducer)

    def _cut_views(self) -> None:
        for number, bucket in enumerate(self._plan.buckets):
            memory = from_buffer(self.reducer.buffers[number])
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                spec = self._plan.specs[index]
                view = torch.as_strided(memory, spec.shape, spec.strides, start)
                self._views[index] = view
                self._bucket_of[index] = number

    def _reset(self) -> None:
        self._seen: set[int] = set()
        self._missing = [len(bucket.parameters) for bucket in self._plan.buckets]
        self._delivered = 0
        self._callback_queued = False

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
        return bool(self._seen)

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
            if index in self._seen:
                self._start_over(index)
            self._take(index)
            self._seen.add(index)
            self._missing[self._bucket_of[index]] -= 1
            while not self.reducer.complete and self._missing[self.reducer.launched] == 0:
                self.reducer.launch()
            if not self._callback_queued:
                self._callback_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _start_over(self, index: int) -> None:
        # A step that was skipped after a complete backward pass (a loss scaler does that)
        # leaves fresh gradients behind; anything else would be reduced twice.
        if not self.reducer.complete or self._is_view(index):
            raise RuntimeError(
                f"the gradient of {self._names[index]!r} was computed twice before step(): call "
                "step() or zero_grad() after each backward()"
            )
        self._finish()

    def _is_view(self, index: int) -> bool:
        gradient = self._parameters[index].grad
        return gradient is not None and gradient.data_ptr() == self._views[index].data_ptr()

    def _take(self, index: int) -> None:
        """Bring a gradient into its bucket."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return
        if gradient.is_sparse:
            raise TypeError(
                f"the gradient of {self._names[index]!r} is sparse, which is not supported: "
                "use sparse=False"
            )
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        if parameter.device.type == "cpu":
            parameter.grad = view

    def _after_backward(self) -> None:
        self._callback_queued = False
        self.reducer.wait()
        self._deliver()

    def _deliver(self) -> None:
        """Copy reduced gradients back to where they do not lie in their bucket."""
        for bucket in self._plan.buckets[self._delivered : self.reducer.launched]:
            for index in bucket.parameters:
                gradient = self._parameters[index].grad
                if gradient is not None and not self._is_view(index):
                    gradient.copy_(self._views[index])
        self._delivered = self.reducer.launched

    def finish(self) -> None:
        """End the step (collective): reduce what is missing, with zeros where this rank has none.

        A parameter that no rank used keeps its gradient None.
        """
        with self._lock:
            if self._plan.buckets:
                self._finish()

    def _finish(self) -> None:
        absent = [index for index, p in enumerate(self._parameters) if p.grad is None]
        if not self.reducer.complete:
            for index in range(len(self._parameters)):
                if index not in self._seen:
                    self._take(index)
            while not self.reducer.complete:
                self.reducer.launch()
        used = [index not in absent for index in range(len(self._parameters))]
        used_anywhere = self.reducer.finish(used)
        for index in absent:
            if used_anywhere[index]:
                parameter = self._parameters[index]
                parameter.grad = self._views[index].to(parameter.device)
        self._reset()


def _spec(name: str, parameter: torch.nn.Parameter) -> ParameterSpec:
    # A gradient in the memory order of its parameter lets the optimizer run through both.
    dense = parameter if _fills_its_memory(parameter) else parameter.detach().contiguous()
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        strides=tuple(dense.stride()),
        dtype=dtype_of(parameter),
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


def _release(hooks: list[RemovableHandle], reducer: GradientReducer) -> None:
    for hook in hooks:
        hook.remove()
    reducer.close()
