"""Gradients of PyTorch parameters, reduced while the backward pass runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.core.bucket_plans import agree_on_change, replan, take_layout
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.errors import TooManyPassesError
from hvdtrain.torch.gradients.hooks import GradientHooks, check_hookable
from hvdtrain.torch.gradients.numbers import Summed
from hvdtrain.torch.gradients.planned import Planned, type_change
from hvdtrain.torch.gradients.settings import GradientSettings
from hvdtrain.torch.gradients.sparse import reduce_sparse
from hvdtrain.torch.tensors.compiling import in_compiled_backward

__all__ = ["Gradients"]


class Gradients:
    """Hands the gradients of parameters to a reducer, as backward passes yield them.

    Parameters may change their type, device or memory order: the plan then is made anew.

    Args:
        parameters: name and parameter, in the order of the model; equal on all ranks.
        settings: equal on all ranks.
        rate: returns the learning rate.

    Attributes:
        passes: backward passes that add up before a reduction.
        parameters: as given.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        settings: GradientSettings,
        rate: Callable[[], float | None] = lambda: None,
    ) -> None:
        check_hookable(parameters)
        self._settings, self._named, self._rate = settings, list(parameters), rate
        self.passes = settings.passes
        self.parameters = [parameter for _, parameter in parameters]
        self._lock = threading.Lock()  # each GPU has a thread
        self._make_plan()
        self._hooks = GradientHooks(self.parameters, self._on_gradient, self._after_backward)
        weakref.finalize(self, self._hooks.remove)

    def _make_plan(self) -> None:
        """Agree on a plan for the parameters as they are (collective)."""
        self._planned = Planned.agree(self._named, self._settings)
        self._release = weakref.finalize(self, setattr, self._planned.channel, "unused", True)
        self._reducer.rate = self._rate
        self._plan_stays = False  # until it follows the order in which gradients came

    @property
    def plan(self) -> BucketPlan:
        """How gradients are cut into buckets now."""
        return self._planned.plan

    @property
    def _reducer(self) -> Reducer:
        return self._planned.reducer

    @property
    def sample_weight(self) -> float | None:
        """What this rank counts in the average of the next steps; None for the plain average."""
        return self._reducer.weight

    @sample_weight.setter
    def sample_weight(self, weight: float | None) -> None:
        self._reducer.weight = weight

    @property
    def steps(self) -> int:
        """How many steps the program has ended."""
        return self._reducer.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._reducer.steps = steps

    @property
    def open(self) -> bool:
        """Whether a gradient has come since the last finish()."""
        return bool(self._reducer.step.passes)

    @property
    def layout(self) -> dict[str, Any] | None:
        """The layout of the plan that stays; None before the first step has shown it."""
        return self.plan.layout if self._plan_stays else None

    def use_layout(self, layout: Mapping[str, Any] | None) -> None:
        """Take the layout that the first rank has for the plan that stays (collective).

        Raises:
            ValueError: it is a layout of other parameters.
            RuntimeError: a step has begun.
        """
        if self.open:
            raise RuntimeError("a bucket plan cannot be taken between backward() and step()")
        plan = take_layout(self.plan, layout, self._settings.process_set.channel())
        if plan is not self.plan:
            self._use_plan(plan)

    def _on_gradient(self, index: int, moved: bool) -> None:
        """Take a gradient that has been added up; `moved`, to another node than before."""
        with self._lock:
            if moved:
                self._planned.views.note_misfit(index)
            if self._reducer.step.passes.get(index, 0) >= self.passes:
                self._start_over(index)
            if not self.open:
                self._begin()
            step = self._reducer.step
            count = step.passes[index] = step.passes.get(index, 0) + 1
            if count == self.passes:
                self._take(index)
                if step.ready(index):
                    self._launch()
        if step.complete and in_compiled_backward():
            self._after_backward()

    def _launch(self) -> None:
        if self._reducer.step.all_ready:
            self._note_numbers(())
        elif in_compiled_backward():  # whose end nobody tells us, if a gradient does not come
            return
        self._reducer.launch()

    def _note_numbers(self, absent: Sequence[int]) -> None:
        step = self._reducer.step
        arrivals = None if self._plan_stays else step.arrivals
        self._planned.note_numbers(absent, step.sparse, arrivals)

    def _start_over(self, index: int) -> None:
        # A step that was skipped after a complete backward pass (a loss scaler does that)
        # leaves fresh gradients behind; anything else would be reduced twice.
        views, step = self._planned.views, self._reducer.step
        if not step.complete or views.is_taken(index):
            raise TooManyPassesError(self._named[index][0], self.passes)
        step.delivered = len(self.plan.buckets)  # nobody has asked for what is still missing
        views.forget()
        self._finish()

    def _take(self, index: int) -> None:
        """Bring a gradient into its bucket."""
        gradient = self.parameters[index].grad
        if gradient is not None and gradient.is_sparse:
            if self._settings.sparse_as_dense:
                gradient = gradient.to_dense()
            else:
                self._reducer.step.sparse[index], gradient = gradient, None
        self._planned.views.take(index, gradient)

    def _after_backward(self) -> None:
        reduced = self._reducer.wait_a_while()
        self._deliver(reduced)
        if self._planned.channel.has_thread:  # else nothing is under way
            launched = self._reducer.step.launched
            self._planned.views.lend(self.plan.buckets[reduced:launched])

    def _deliver(self, count: int) -> None:
        """Hand out the gradients of the first buckets."""
        step = self._reducer.step
        self._planned.views.deliver(self.plan.buckets[step.delivered : count], step.sparse)
        step.delivered = count

    def finish(self) -> None:
        """End the step (collective): reduce what is missing, with zeros where this rank has none.

        A parameter that no rank used keeps its gradient None.
        """
        self._end_step()
        self._reducer.count_step()

    def drop(self) -> None:
        """Forget what has come since the last step.

        Collective where the passes of a gradient are complete: others may have reduced it. Such a
        step ends as any other, but the program has not taken it.
        """
        step = self._reducer.step
        if step.launched or self.passes in step.passes.values():
            self._end_step()
        else:
            self._hooks.forget()
            self._reducer.forget()

    def _end_step(self) -> None:
        self._hooks.forget()
        with self._lock:
            if not self.open:
                self._begin()
            if self.plan.buckets:
                self._finish()

    def _finish(self) -> None:
        try:
            summed = self._reduce_rest()
        finally:
            self._reducer.forget()
        self._make_plan_again(summed)

    def _reduce_rest(self) -> Summed:
        step = self._reducer.step
        # Not by counting passes: one whose gradient could not be taken is complete, but not ready.
        ready = set(step.arrivals)
        late = [i for i in range(len(self.parameters)) if i not in ready]
        absent = [i for i in late if self.parameters[i].grad is None]
        for index in late:
            self._take(index)
        if late and not step.complete:
            self._note_numbers(absent)
            for index in late:
                self._reducer.ready(index)
        summed = Summed.of(self._reducer.finish())
        self._deliver(len(self.plan.buckets))
        self._planned.views.give(index for index in absent if summed.used[index])
        weighted = self.sample_weight is not None
        reduce_sparse(summed.sparse, step.sparse, self._named, self._settings, weighted)
        return summed

    def _make_plan_again(self, summed: Summed) -> None:
        """Make another plan for the next step, if it is time and all ranks are there."""
        if summed.present != len(self._planned.channel.ranks):
            return
        if summed.outgrown:
            self._make_plan_anew()
        elif not self._plan_stays:
            self._use_plan(replan(self.plan, summed.places))

    def _use_plan(self, plan: BucketPlan) -> None:
        """Reduce by a plan that stays, from the next step on."""
        self._plan_stays = True
        self._planned.use_plan(plan)

    def refuse_capture(self) -> None:
        """Refuse to be part of a graph that a device records; see `Planned.refuse_capture`."""
        self._planned.refuse_capture()

    def _begin(self) -> None:
        """Make the plan anew if parameters have other types now (collective, before a step)."""
        self.refuse_capture()
        change = type_change(self._named, self._planned.types)
        if change:
            agree_on_change(self._planned.channel, self._reducer.name, change)
            self._make_plan_anew()

    def _make_plan_anew(self) -> None:
        weight, kept = self.sample_weight, self._planned.views.kept()
        steps = self.steps
        self._release()
        self._make_plan()
        self.sample_weight, self.steps = weight, steps
        self._planned.views.restore(kept)
