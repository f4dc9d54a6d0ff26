"""An optimizer's hold on its parameters: its claim on them, and the hooks that report gradients."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.gradients.step_info import StepCounter
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.buckets import Named, ParameterBuckets, ParameterSettings
from hvdtrain.torch.operations.dynamo import disable_compile, in_compiled_backward
from hvdtrain.torch.operations.watched_models import (
    CLAIMS,
    FLATTENING,
    find_others,
    is_flattened,
    reason,
)


class ClaimedParameters:
    """One optimizer's claim on its parameters, void while a later one of any of them exists.

    It has the buckets in which ranks exchange the parameters' gradients or weights.
    """

    @collective
    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Named, settings: ParameterSettings
    ) -> None:
        self._optimizer, self._named, self._settings = optimizer, list(named), settings
        self.parameters = [parameter for _, parameter in named]
        self.names = {id(parameter): name for name, parameter in named}
        self.weight: float | None = None
        self.counter = StepCounter()
        self._make_plan()
        self._later: weakref.WeakSet[ClaimedParameters] = weakref.WeakSet()
        for other, names in CLAIMS.items():
            if not self.names.keys().isdisjoint(names):
                other._later.add(self)
        CLAIMS[self] = self.names

    @collective
    def _make_plan(self) -> None:
        self.world = context.current()
        self.buckets = ParameterBuckets(self._named, self._settings)
        self._leave_channel = weakref.finalize(self, setattr, self.buckets.channel, "unused", True)

    @collective
    def _remake_plan(self) -> None:
        self._leave_channel()
        self._make_plan()

    @property
    def lost(self) -> bool:
        return len(self._later) > 0

    def check_claim(self) -> None:
        """Check that no later optimizer that still exists has one of the parameters."""
        for later in self._later:
            name = next(name for key, name in self.names.items() if key in later.names)
            raise RuntimeError(
                f"parameter {name!r} was given to another DistributedOptimizer later, and only "
                "the last one averages its gradient: step with that one, and delete this one or "
                "give it other parameters; or delete that one and all that refers to it, such as "
                "its learning rate schedulers"
            )

    def check_kept(self, used: Iterable[object]) -> None:
        """Check that FSDP has not replaced parameters, given which have gradients on some rank."""
        others = find_others(self.parameters)
        flattened = not any(used) and is_flattened()
        for name, parameter in self._named:
            if flattened or id(parameter) in others:
                why = others.get(id(parameter)) or reason(FLATTENING)
                raise UnsupportedError(f"parameter {name!r} of a DistributedOptimizer {why}")


def check_hookable(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Check that autograd can accumulate gradients of the parameters."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "torch.inference_mode() computes no gradients: call DistributedOptimizer outside "
            "torch.inference_mode()"
        )
    for name, parameter in named:
        if parameter.is_inference():
            raise RuntimeError(
                f"parameter {name!r} was created in torch.inference_mode() and gets no gradient: "
                "create the model outside of it"
            )


class GradientHooks:
    """Hooks on parameters that run after all of the user's hooks.

    A tensor's hooks run before those of its AccumulateGrad node, in whatever order they were
    registered, so the hook that reports the gradient is on the node. But a parameter whose dtype
    or device changes gets another node, and keeps only its tensor hooks: such a gradient is
    reported at the end of the backward pass. A hook of the user may end the step, which takes the
    gradient as it is then: its own hook does not report it once more.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        on_gradient: Callable[[int, torch.Tensor | None], None],
        on_backward_end: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._on_backward_end = weakref.WeakMethod(on_backward_end)
        self._lock = threading.Lock()  # autograd has a thread for each GPU
        self._pending: set[int] = set()
        self._callback_queued = False
        self.nested = False  # whether a backward pass within another one has ended in this step
        self._followed: list[RemovableHandle] = []  # by which the end of the outer one is found
        # torch.compile would compile hooks that run within a function that calls backward().
        tensor_hook = disable_compile(weakly(self._note_pending))
        self._node_hook = self._make_node_hook()
        self._tensor_handles: list[RemovableHandle] = [
            _register_first(parameter, partial(tensor_hook, index))
            for index, parameter in enumerate(parameters)
        ]
        self._nodes: dict[int, Node] = {}  # a tensor does not keep its node alive
        self._node_handles: dict[int, RemovableHandle] = {}
        for index in range(len(parameters)):
            self._hook_node(index)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has not ended, or has failed."""
        return self._callback_queued

    @property
    def all_reported(self) -> bool:
        """Whether a backward pass has not ended, and all that it has computed is reported."""
        return self._callback_queued and not self._pending

    def forget(self) -> None:
        """Discard gradients not reported yet, and what a failed backward pass has left."""
        self._callback_queued = self.nested = False
        self._pending.clear()

    def take_pending(self) -> list[int]:
        """Return what is accumulated and not reported: in a user's hook, the gradient itself."""
        taken = sorted(self._pending)
        self._pending.clear()
        return taken

    def remove(self) -> None:
        for handle in (*self._tensor_handles, *self._node_handles.values(), *self._followed):
            handle.remove()
        self._nodes.clear()

    def _hook_node(self, index: int) -> None:
        if index in self._node_handles:
            self._node_handles[index].remove()
        node = self._nodes[index] = get_gradient_edge(self._parameters[index]).node
        self._node_handles[index] = node.register_hook(partial(self._node_hook, index))

    def _note_pending(self, index: int, _: torch.Tensor) -> None:
        """Note a gradient that is accumulated, but that the user's hooks may still change."""
        with self._lock:
            if not self._callback_queued and not in_compiled_backward():
                self._pending.clear()  # a failed backward pass may have left some
                self._queue_callback()
            self._pending.add(index)

    def _queue_callback(self) -> None:
        self._callback_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _make_node_hook(self) -> Callable[..., None]:
        """Return the hook that reports a gradient; it is on the hot path of the backward pass."""
        pending, reference = self._pending, self._on_gradient

        def call(index: int, _: object, incoming: tuple[torch.Tensor, ...]) -> None:
            if index not in pending:  # a hook of the user has ended the step
                return
            pending.discard(index)
            on_gradient = reference()
            if on_gradient is not None:
                on_gradient(index, *incoming)

        return disable_compile(call)

    @disable_compile
    def _after_backward(self) -> None:
        with self._lock:
            self._callback_queued = False
            moved = self.take_pending()
        on_gradient, on_backward_end = self._on_gradient(), self._on_backward_end()
        if on_gradient is None or on_backward_end is None:
            return
        for index in moved:
            self._hook_node(index)
            on_gradient(index, None)
        if not self._await_outer():
            on_backward_end()

    def _await_outer(self) -> bool:
        """Wait for the end of an outer backward pass, if there is one; return whether that is so.

        A callback is of the pass that runs, which is the outer one again at its next node.
        """
        self._stop_waiting()
        outer = outer_node()
        followers = () if outer is None else outer.next_functions
        self._followed = [n.register_prehook(self._resume) for n, _ in followers if n is not None]
        self.nested = self.nested or outer is not None
        return bool(self._followed)

    def _resume(self, _: object) -> None:
        self._stop_waiting()
        with self._lock:
            if not self._callback_queued:
                self._queue_callback()

    def _stop_waiting(self) -> None:
        for handle in self._followed:
            handle.remove()
        self._followed = []


def outer_node() -> Node | None:
    """Return the node that runs this backward pass, as a reentrant checkpoint's does, if any."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        of_function = code.co_filename.endswith("torch/autograd/function.py")
        if of_function and code.co_name == "apply" and "self" in frame.f_locals:  # not forward()
            node: Node = frame.f_locals["self"]
            return node
        frame = frame.f_back
    return None


def _register_first(
    parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Register a hook to run before those of the user, which may step."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    hooks = parameter._post_accumulate_grad_hooks
    for other in [key for key in hooks if key != handle.id]:
        hooks[other] = hooks.pop(other)
    return handle


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls a bound method while its object exists."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call
