"""Reduction of the gradients of PyTorch parameters during the backward pass."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.bucket_plans import replan, take_layout
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.gradients.step import StepUsage
from hvdtrain.core.gradients.step_info import (
    OwnStep,
    StepInfo,
    WeightSums,
    is_due,
    note_differences,
)
from hvdtrain.errors import TooManyPassesError
from hvdtrain.torch.buckets import Named, ParameterSettings
from hvdtrain.torch.operations.dynamo import in_compiled_backward
from hvdtrain.torch.operations.parts import rate_of, weight_sums
from hvdtrain.torch.operations.watched_models import CLAIMS
from hvdtrain.torch.parameters import (
    ClaimedParameters,
    GradientHooks,
    check_hookable,
    outer_node,
)
from hvdtrain.types import ReduceOp


@collective
def reduce_sparse(
    own: torch.Tensor | None,
    name: str,
    parameter: torch.nn.Parameter,
    settings: GradientSettings,
    info: StepInfo,
) -> torch.Tensor:
    """Return the total of all ranks' sparse gradients, of rows and coalesced."""
    if own is None:
        device = parameter.device
        own = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=device),
            torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=device),
            parameter.shape,
            device=device,
            check_invariants=device.type == "cpu",  # on a GPU the host would wait for it
        )
    elif own.sparse_dim() != 1:  # gather() gives elements, and another rank may have rows
        own = own.to_dense().to_sparse(1)
    if info.weighted:
        own = own * info.weigh()
    from hvdtrain.torch.operations.gathers import sparse_allreduce_async

    handle = sparse_allreduce_async(
        own.coalesce(), f"sparse gradient of {name}", settings.total, settings.process_set
    )
    total: torch.Tensor = handle.wait().coalesce()
    return total


class Gradients(ClaimedParameters):
    """Passes the gradients of parameters to a reducer as backward passes compute them.

    Parameters may change their dtype, device or memory format: a new plan is then made.
    """

    @collective
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Named,
        settings: ParameterSettings,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        check_hookable(named)
        self.passes, self.scaler = settings.passes, scaler
        self._lock = threading.Lock()  # autograd has a thread for each GPU
        self._waiting: list[int] = []  # accumulated, and not accepted before the backward pass ends
        # Gradients of which some backward passes are missing.
        self._partial: weakref.WeakValueDictionary[int, torch.Tensor]
        self._partial = weakref.WeakValueDictionary()
        # With create_graph autograd makes new sums: what they are of, and its version.
        self._summands: dict[int, tuple[torch.Tensor, int]] = {}
        self._pass_ended = False  # and no gradient has arrived since
        self._removed: set[int] = set()  # taken, and removed by the program before their reduction
        self._versions: list[int] = []  # of parameters, if some have gradients not reduced yet
        self.whole = True
        self.info: StepInfo | None = None
        self.before_new_buckets: Callable[[], object] = bool
        self._told = False  # that weights differ
        self._warned = False  # that gradients were changed too early
        super().__init__(optimizer, named, settings)
        self._hooks = GradientHooks(self.parameters, self._on_gradient, self._after_backward)
        weakref.finalize(self, self._hooks.remove)

    @collective
    def _make_plan(self) -> None:
        super()._make_plan()
        self.used: Sequence[int] = ()  # for each parameter, how many ranks had the last gradient
        self._removed_before = ""  # of these gradients, the program, for the next step
        self.plan_is_final = False  # until it follows the order in which gradients arrive

    @property
    def plan(self) -> BucketPlan:
        return self.buckets.plan

    @property
    def _own(self) -> OwnStep:
        """What this rank submits the present step with, or has."""
        own = self.buckets.step.own
        if own is not None:
            return own
        exchange = self.buckets.exchange
        return OwnStep(
            self.weight,
            self.counter.steps,
            rate=rate_of(self._optimizer) if exchange.uses_rate else None,
            scale=self.scaler.get_scale() if exchange.uses_scale and self.scaler else 1.0,
            variant=self._removed_before,
            weights=self._weights_to_compare(),
        )

    def _weights_to_compare(self) -> WeightSums | None:
        # By the number that ranks agree on: one that loads a state alone counts otherwise.
        due = self.info is not None and is_due(self.info.step + 1) and not self._told
        return weight_sums(self._named) if due else None

    @property
    def sent_weight(self) -> float | None:
        """The weight with which the first bucket of this step left, or will."""
        own = self.buckets.step.own
        return self.weight if own is None else own.weight

    @property
    def open(self) -> bool:
        """Whether a gradient has arrived since the last reduce()."""
        return bool(self.buckets.step.passes)

    @property
    def any_complete(self) -> bool:
        """Whether all passes of some gradient have arrived since the last reduce()."""
        return self.passes in self.buckets.step.passes.values()

    @property
    def layout(self) -> dict[str, Any] | None:
        """The layout of the final plan; None before the first step has determined it."""
        return self.plan.layout if self.plan_is_final else None

    @collective
    def use_layout(self, layout: Mapping[str, Any] | None) -> None:
        """Use the layout that the first rank was given as the final plan."""
        if self.open:
            raise RuntimeError(
                "a bucket plan cannot be set between backward() and step(): call step() first"
            )
        plan = take_layout(self.plan, layout, self._settings.process_set.channel())
        if plan is not self.plan:
            self._use_plan(plan)

    @collective
    def _on_gradient(self, index: int, incoming: torch.Tensor | None) -> None:
        """Handle an accumulated gradient; `incoming` is None if its own hook did not report it."""
        # No name for the gradient here: one that is referenced elsewhere is copied.
        # A hook of the program may have dropped it.
        if self.parameters[index].grad is None or self.lost:
            return
        with self._lock:
            if incoming is None:
                self.buckets.note_misfit(index)
            if self._settings.sharded:
                self.buckets.look(self._complete(), index)
            if (self._pass_ended and self._all_dropped()) or self._returns(index, incoming):
                self._check_unused()
                self._start_over()
            elif self._pass_ended:
                self._take_again()
            self._pass_ended = False
            if not self.open:
                if not self.whole and self.buckets.holds(index):
                    self._hooks.forget()
                    raise RuntimeError(
                        f"backward() accumulated into the gradient of {self._named[index][0]!r} "
                        "after clip_grad_norm_() had reduced it. With sharded=True each rank holds "
                        "only its slice: call optimizer.step() or optimizer.zero_grad() first"
                    )
                self._begin()
                self.buckets.leave_to_program()  # after a skipped step
            step = self.buckets.step
            count = step.passes[index] = step.passes.get(index, 0) + 1
            if count < self.passes:
                gradient = self.parameters[index].grad
                assert gradient is not None
                self._partial[index] = gradient
                if torch.is_grad_enabled():
                    self._summands[index] = gradient.detach(), gradient._version
            else:
                if self.buckets.exchange.at_once and not in_compiled_backward():
                    self._waiting.append(index)
                else:
                    self._accept(index, incoming)
        if step.all_launched and in_compiled_backward():
            self._after_backward()

    def _accept(self, index: int, incoming: torch.Tensor | None) -> None:
        """Let a gradient be reduced where it is, or in its bucket."""
        if not self.buckets.stays(index, incoming):
            self._take(index)
        if self.buckets.step.mark_ready(index):
            self._launch()

    def _accept_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for index in waiting:
            self._accept(index, None)

    def _launch(self, pass_ended: bool = False) -> None:
        if self.buckets.step.all_ready:
            self._write_usage(())
        elif in_compiled_backward():  # its end is not reported if a gradient is missing
            return
        if self.buckets.launch(pass_ended):
            self.buckets.submit(self._own)

    def _write_usage(self, absent: Sequence[int]) -> None:
        step = self.buckets.step
        arrivals = None if self.plan_is_final else step.arrivals
        self.buckets.write_usage([*absent, *self._removed], step.sparse, arrivals)

    def _returns(self, index: int, incoming: torch.Tensor | None) -> bool:
        """Return whether a gradient was taken in this step, dropped, and computed again."""
        passes, gradient = self.buckets.step.passes, self.parameters[index].grad
        before = self._summands.pop(index, None)
        assert gradient is not None
        if passes.get(index, 0) < self.passes:
            if index in passes and self._partial.get(index) is not gradient:
                # Unless the program has replaced it, it has dropped the passes before this one.
                # The host does not wait for a device to find that out.
                new = _is_new if gradient.is_cpu else _is_same
                if new(gradient, incoming) and not _is_sum(gradient, before, incoming):
                    passes[index] = 0
            return False
        returns = not self._is_taken(index) or _is_new(gradient, incoming)
        if self._settings.sharded or self._settings.op is not ReduceOp.AVERAGE:
            # What ranks have reduced cannot be reduced again; an average can, if it is kept.
            returns = returns and not any(map(self._is_kept, set(self._complete()) - {index}))
        if not returns:
            nested = self._hooks.nested or outer_node() is not None
            raise TooManyPassesError(self._named[index][0], self.passes, nested)
        return True

    def _is_taken(self, index: int) -> bool:
        """Return whether a parameter has the gradient that was taken in this step."""
        sparse = self.buckets.step.sparse.get(index)
        if sparse is not None:
            return sparse is self.parameters[index].grad
        return self.buckets.is_taken(index)

    def _is_kept(self, index: int) -> bool:
        """Return whether the program has left a gradient that was taken as it is."""
        gradient = self.parameters[index].grad
        if gradient is None or not self._is_taken(index):
            return False
        return gradient.is_sparse or bool(gradient.any())

    def _all_dropped(self) -> bool:
        """Return whether there are complete gradients, and the program has removed them all."""
        return self.any_complete and all(self.parameters[i].grad is None for i in self._complete())

    @collective
    def _start_over(self) -> None:
        """End a step that the program skips, as loss scalers do; the next one has its gradients."""
        launched = {
            i for b in self.plan.buckets[: self.buckets.step.launched] for i in b.parameters
        }
        kept = [
            self.buckets.withdraw(index, index in launched) for index in range(len(self.parameters))
        ]
        self._complete_step()
        for index, gradient in enumerate(kept):
            if gradient is not None and index in launched:
                gradient = gradient.clone()  # reduced by now, in memory that the next step uses
            self.parameters[index].grad = gradient

    def _check_unused(self) -> None:
        """Check that the program has not moved weights by gradients that were not reduced."""
        if self._versions and self._versions != self._parameter_versions():
            reason = (
                "with sharded=True they are those of this rank alone"
                if self._settings.sharded
                else "some were not reduced yet, because a parameter had none"
            )
            raise RuntimeError(
                "weights were changed between two backward passes, as SAM does, and gradients "
                f"removed or zeroed, but {reason}: call optimizer.synchronize() before you use "
                "gradients, or use a method of the wrapped optimizer, which calls it"
            )

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _take(self, index: int) -> None:
        gradient = self.parameters[index].grad
        if gradient is not None and gradient.is_sparse:
            if self._settings.sparse_as_dense or self._settings.sharded:
                gradient = gradient.detach().to_dense()  # also if it has a graph
            else:
                self.buckets.step.sparse[index], gradient = gradient, None
        self.buckets.take(index, gradient)

    def _after_backward(self) -> None:
        self._launch_waiting()
        for other in list(CLAIMS):  # before this rank waits for one of them
            if isinstance(other, Gradients) and other._hooks.all_reported:
                other._launch_waiting()
        local = self.any_complete and (self._settings.sharded or not self.buckets.step.all_launched)
        self._versions = self._parameter_versions() if local else []
        reduced = self.buckets.wait_for_launched()
        self._deliver(reduced)
        if self.buckets.channel.has_thread:  # otherwise nothing is in progress
            launched = self.buckets.step.launched
            self.buckets.lend(self.plan.buckets[reduced:launched])
        if self._settings.sharded or local:
            self.buckets.note(self._complete())

    def _launch_waiting(self) -> None:
        """Launch what has waited for the end of a backward pass."""
        with self._lock:
            if self._pass_ended:
                return
            self._accept_waiting()
            if not self.buckets.step.all_launched:
                self._launch(pass_ended=True)
            self._pass_ended = True

    def _complete(self) -> Iterator[int]:
        """Yield the parameters whose gradients are computed in this step."""
        passes = self.buckets.step.passes.items()
        return (index for index, count in passes if count == self.passes)

    def check_unchanged(self) -> None:
        """Check that gradients are those that were noted after backward(), or after changes."""
        if self.open and self._hooks.in_backward and self.buckets.arriving:
            raise RuntimeError(
                "sharded=True: step(), synchronize() or clip_grad_norm_() was called before "
                "backward() had ended, when gradients of this optimizer had arrived already: call "
                "it after backward(), or wrap one optimizer for each parameter whose hook steps; "
                "after a failed backward(), call zero_grad()"
            )
        taken = self._complete() if self.open else range(len(self.parameters))
        changed = self.buckets.changed(taken)
        if changed is not None:
            raise RuntimeError(
                f"the gradient of {self._named[changed][0]!r} (or another in its bucket) was "
                "changed or replaced between backward() and step(). With sharded=True gradients "
                "are not yet averaged at that point: clip with optimizer.clip_grad_norm_(), or "
                "call optimizer.synchronize() before you change gradients, and step() within "
                "`with optimizer.skip_synchronize():`"
            )

    def _deliver(self, count: int) -> None:
        """Set the gradients of the first `count` buckets to the reduced ones."""
        step = self.buckets.step
        self.buckets.deliver(self.plan.buckets[step.delivered : count], step.sparse)
        step.delivered = count

    @collective
    def reduce(self) -> None:
        """Reduce the remaining gradients, as zeros where only other ranks used the parameter."""
        self.check_claim()
        for index in self._hooks.take_pending():
            self._on_gradient(index, None)
        with self._lock:
            if self._all_dropped():
                self._start_over()
        self._check_weight()
        changed, late = None, list[int]()
        if self._versions and not (self._settings.sharded or self._warned):
            changed = self.buckets.changed(self._complete())
            late = [
                i for b in self.plan.buckets[self.buckets.step.launched :] for i in b.parameters
            ]
        arrived = list(self.buckets.step.passes)
        usage = self._end_step()
        self.buckets.count_step()
        self.counter.steps += 1
        self.used = () if usage is None else usage.used
        if self.counter.steps == 1:
            self.check_kept(self.used)
        if usage is not None:
            self._check_removed(arrived, usage)
            used = next((i for i in late if usage.used[i]), None)
            if changed is not None and used is not None:
                self._warn_of_changes(changed, used)

    def _warn_of_changes(self, changed: int, late: int) -> None:
        self._warned = True
        warnings.warn(
            f"the gradient of {self._named[changed][0]!r} was changed after backward(), when ranks "
            f"had not averaged that of {self._named[late][0]!r} yet, because some had none: they "
            "may train different models. Call optimizer.synchronize() before you change gradients, "
            "and step() within `with optimizer.skip_synchronize():`",
            stacklevel=2,
        )

    def note_removed(self) -> None:
        """Note which results the program does not step on; ranks compare that in the next step."""
        none = [index for index, p in enumerate(self.parameters) if p.grad is None]
        removed = [self._named[i][0] for i in none if self.used and self.used[i] and not self.open]
        self._removed_before = ""
        if removed:
            self._removed_before = (
                f", the last step() without the averages of {', '.join(map(repr, removed))}: "
                "remove them on all ranks or on none"
            )

    def _check_weight(self) -> None:
        """Check that the weight of this step is the one with which its first bucket left."""
        if self.sent_weight != self.weight:
            raise RuntimeError(
                f"sample_weight was set to {self.weight} after gradients of this step were sent "
                f"with {self.sent_weight}: set it before the step's last backward(), or call "
                "zero_grad() before you set that of the next step"
            )

    def _check_removed(self, arrived: Sequence[int], usage: StepUsage) -> None:
        """Check that no other rank was given a gradient that this one has removed."""
        some = {i for i, count in enumerate(usage.used) if 0 < count < usage.present}
        for index in some.intersection(arrived):
            if self.parameters[index].grad is None:
                raise RuntimeError(
                    f"the gradient of {self._named[index][0]!r} was removed between backward() and "
                    "step(), but ranks that did not compute it have its average now: remove it "
                    "after optimizer.synchronize(), and call step() within `with "
                    "optimizer.skip_synchronize():`"
                )

    def forget_results(self) -> None:
        """Let the program use its gradients for other numbers than the last results."""
        self._hooks.forget()  # a backward pass may have failed before a gradient arrived
        self.buckets.forget_changes()
        if self.buckets.sharded is not None:  # else they are released, also if a step is skipped
            self.buckets.leave_to_program()
        self.whole = True

    @collective
    def spread(self) -> None:
        """Give all ranks the results of the last reduction for all elements."""
        if not self.whole:
            self.buckets.spread_slices()
            self.buckets.deliver(self.plan.buckets, ())
            self.whole = True

    @collective
    def drop(self) -> None:
        """Discard the gradients that have arrived since the last step.

        Collective if all backward passes of some gradient are complete, because other ranks may
        have reduced it. Such a step ends as any other, but is not counted.
        """
        step = self.buckets.step
        if step.launched or self.any_complete:
            self._end_step()
        else:
            self._waiting.clear()  # of a failed backward pass
            self._hooks.forget()
            self._forget_step()

    def interrupt(self) -> None:
        """Discard the gradients of a step that ended because ranks were lost."""
        self._waiting.clear()
        self._hooks.forget()
        self._forget_step()
        self.whole = True
        for parameter in self.parameters:
            parameter.grad = None

    def _forget_step(self) -> None:
        self.buckets.forget()
        self.buckets.forget_changes()
        self._summands.clear()
        self._pass_ended = False
        self._versions = []
        self._removed.clear()

    @collective
    def _end_step(self) -> StepUsage | None:
        self._hooks.forget()
        with self._lock:
            if not self.open:
                self._begin()
            return self._complete_step() if self.plan.buckets else None

    @collective
    def _complete_step(self) -> StepUsage:
        try:
            usage = self._reduce_rest()
        finally:
            self._forget_step()
        if self.buckets.sharded is None:  # a shared step uses them, too
            self.buckets.leave_to_program()
        self._update_plan(usage)
        return usage

    @collective
    def _reduce_rest(self) -> StepUsage:
        self._accept_waiting()  # of a backward pass that has failed
        step = self.buckets.step
        # Not by counting passes: a gradient that could not be taken has all of them.
        ready = set(step.arrivals)
        late = [i for i in range(len(self.parameters)) if i not in ready]
        absent = [i for i in late if self.parameters[i].grad is None]
        self._take_again()
        for index in late:
            self._take(index)
        if late and not step.all_launched:
            self._write_usage(absent)
            for index in late:
                self.buckets.step.mark_ready(index)
        usage = StepUsage.from_sums(self.buckets.finish(self._own))
        self.info = info = step.info
        assert info is not None
        channel, at = self.buckets.channel, f"at step {info.step + 1}"
        self._told |= note_differences(info.weights, channel, at)
        self.whole = self.buckets.whole
        self._deliver(len(self.plan.buckets))
        self._give(usage, absent, step.sparse)
        return usage

    @collective
    def _give(
        self, usage: StepUsage, absent: Sequence[int], sparse: Mapping[int, torch.Tensor]
    ) -> None:
        """Set the gradients that this rank had not, or not dense, as all ranks' usage says."""
        with_dense = usage.with_dense
        self.buckets.give(i for i in (*absent, *sparse) if i in with_dense)
        assert self.info is not None
        for index in (i for i, count in enumerate(usage.sparse) if count):
            name, parameter = self._named[index]
            total = reduce_sparse(sparse.get(index), name, parameter, self._settings, self.info)
            if index in with_dense:
                assert parameter.grad is not None
                parameter.grad.detach().index_add_(0, total.indices()[0], total.values())
            else:
                parameter.grad = total

    def _take_again(self) -> None:
        """Take gradients that the program has changed, in buckets that are not launched."""
        step = self.buckets.step
        ready = set(step.arrivals)
        for bucket in self.plan.buckets[step.launched :]:
            for index in ready.intersection(bucket.parameters):
                if not self.buckets.is_current(index):
                    step.sparse.pop(index, None)
                    self._take(index)
                    if self.parameters[index].grad is None:
                        self._removed.add(index)

    @collective
    def _update_plan(self, usage: StepUsage) -> None:
        """Change the plan for the next step if needed, and if all ranks take part."""
        if usage.present != len(self.buckets.channel.ranks):
            return
        if usage.outdated:
            self.spread()
            self._remake_plan()
        elif not self.plan_is_final:
            self._use_plan(replan(self.plan, usage.positions, usage.unused))

    def _use_plan(self, plan: BucketPlan) -> None:
        """Use a final plan from the next step on."""
        self.plan_is_final = True
        self.buckets.use_plan(plan)

    @collective
    def _begin(self) -> None:
        """Make a new plan if dtypes of parameters or the world have changed."""
        self.buckets.refuse_capture()
        new_world = context.is_initialized() and context.current() is not self.world
        if new_world or self.buckets.changed_dtypes():
            self._remake_plan()

    @collective
    def _remake_plan(self) -> None:
        self.before_new_buckets()
        kept = self.buckets.kept()
        super()._remake_plan()
        self.buckets.restore(kept)


def _is_same(gradient: torch.Tensor, incoming: torch.Tensor | None) -> bool:
    """Return whether autograd has made a gradient of the very tensor that it was given."""
    if incoming is None or gradient.is_sparse or incoming.is_sparse:
        return False
    return gradient.data_ptr() == incoming.data_ptr()


def _is_new(gradient: torch.Tensor, incoming: torch.Tensor | None) -> bool:
    """Return whether a gradient is what autograd has just added, so that it was none or zero."""
    if incoming is None or gradient.is_sparse or incoming.is_sparse:
        return False
    return _is_same(gradient, incoming) or bool(
        torch.isclose(gradient, incoming, rtol=0, atol=0, equal_nan=True).all()
    )


def _is_sum(
    gradient: torch.Tensor,
    before: tuple[torch.Tensor, int] | None,
    incoming: torch.Tensor | None,
) -> bool:
    """Return whether a gradient may be a sum, although it equals what was added: 0 + x, NaN + x."""
    if before is None or incoming is None or before[0]._version != before[1]:
        return False
    return _is_new(gradient, incoming.detach() + before[0])
