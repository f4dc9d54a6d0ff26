"""Calls when a parameter's gradient is there, and no hook of the user's will change it. Local."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hvdtrain.torch.tensors.compiling import in_compiled_backward, uncompiled

__all__ = ["GradientHooks", "check_hookable"]


def check_hookable(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise RuntimeError if parameters have no node that accumulates a gradient."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() computes no gradients: call DistributedOptimizer outside "
            "torch.inference_mode()"
        )
    for name, parameter in named:
        if parameter.is_inference():
            raise RuntimeError(
                f"parameter {name!r} was made in torch.inference_mode() and gets no gradient: "
                "make the model outside of it"
            )


class GradientHooks:
    """Hooks on parameters that run after all hooks of the user's.

    The hooks of a tensor run before those of the node that accumulates its gradient, in whatever
    order they were registered, so the hook that counts is on the node. But a parameter that is
    given another type or device gets another node, and only its own hooks stay: such a gradient is
    noticed at the end of the backward pass.

    Args:
        parameters: of which each needs a gradient.
        arrived: bound method, called with a parameter's index when its gradient is there, and
            whether its node is another one than it was.
        passed: bound method, called at the end of a backward pass.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        arrived: Callable[[int, bool], None],
        passed: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._arrived, self._passed = weakref.WeakMethod(arrived), weakref.WeakMethod(passed)
        self._lock = threading.Lock()  # each GPU has a thread
        self._coming: set[int] = set()
        self._callback_queued = False
        on_tensor, self._on_node = _uncompiled(self._note), self._calling_on()
        self._on_tensors = [
            parameter.register_post_accumulate_grad_hook(partial(on_tensor, index))
            for index, parameter in enumerate(parameters)
        ]
        self._nodes: dict[int, Node] = {}  # which a tensor does not keep alive
        self._on_nodes: dict[int, RemovableHandle] = {}
        for index in range(len(parameters)):
            self._hook_node(index)

    def forget(self) -> None:
        """Forget what a backward pass that failed has left."""
        self._callback_queued = False

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in (*self._on_tensors, *self._on_nodes.values()):
            handle.remove()
        self._nodes.clear()

    def _hook_node(self, index: int) -> None:
        if index in self._on_nodes:
            self._on_nodes[index].remove()
        node = self._nodes[index] = get_gradient_edge(self._parameters[index]).node
        self._on_nodes[index] = node.register_hook(partial(self._on_node, index))

    def _note(self, index: int) -> None:
        """Note a gradient that has been added up, but hooks of the user's may still change."""
        with self._lock:
            if not self._callback_queued and not in_compiled_backward():
                self._callback_queued = True
                self._coming.clear()  # a backward pass that failed may have left some
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            self._coming.add(index)

    def _calling_on(self) -> Callable[..., None]:
        """Return what hands gradients on; it runs for each of them, and is cut short."""
        coming, arrived = self._coming, self._arrived

        def call(index: int, *_: object) -> None:
            coming.discard(index)
            found = arrived()
            if found is not None:
                found(index, False)

        return uncompiled(call)

    def _after_backward(self) -> None:
        with self._lock:
            self._callback_queued = False
            moved = sorted(self._coming)
        arrived, passed = self._arrived(), self._passed()
        if arrived is None or passed is None:
            return
        for index in moved:
            self._hook_node(index)
            arrived(index, True)
        passed()


def _uncompiled(method: Callable[[int], None]) -> Callable[..., None]:
    """Return what calls a bound method as long as its object is there, and is never compiled.

    torch.compile else compiles what runs beneath a function that calls backward().
    """
    reference = weakref.WeakMethod(method)

    def call(index: int, *_: object) -> None:
        found = reference()
        if found is not None:
            found(index)

    return uncompiled(call)
