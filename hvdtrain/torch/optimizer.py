"""The optimizer wrapper: the user's optimizer, stepping on gradients of all ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.compression import Compressor
from hvdtrain.core.gradient_settings import (
    Groups,
    check_groups,
    check_sharding,
    choose_exchange,
    choose_groups,
)
from hvdtrain.core.gradients.exchange import Exchange, SavedExchange
from hvdtrain.core.operations import choose_op
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.torch.averaged_gradients import Gradients
from hvdtrain.torch.buckets import ParameterSettings
from hvdtrain.torch.exchanged import Exchanged
from hvdtrain.torch.kernel_step import KernelSteps
from hvdtrain.torch.operations.dynamo import disable_compile
from hvdtrain.torch.operations.parts import check_reduced, name_parameters, parameters_of
from hvdtrain.torch.operations.watched_models import warn_of_torch_layers
from hvdtrain.torch.optimizer_wrapper import OptimizerWrapper, is_of_torch, loss_of_all_ranks
from hvdtrain.types import ReduceOp

if TYPE_CHECKING:
    from hvdtrain.torch.sharding.shared_steps import TorchSharedSteps

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(OptimizerWrapper):
    """Wrap an optimizer so that it steps on the gradients of all ranks (collective).

    Gradients are reduced in buckets while backward() runs. They are reduced when it returns, so
    clipping and unscaling go between backward() and step() as usual. step() reduces gradients
    that backward() did not compute, as zeros where this rank has none, so a rank without data
    calls it too.

    Args:
        optimizer: any torch optimizer; it keeps its state and parameter groups.
        named_parameters: `model.named_parameters()`, for names in messages; without it
            parameters are numbered.
        compression: Compression.fp16 or bf16, equivalent to exchange="half:type=fp16" or bf16; or
            a class of your own, whose methods change gradients before and after the reduction.
        backward_passes_per_step: number of backward passes whose gradients are accumulated
            locally before they are reduced; for their mean, divide the loss yourself.
        op: Average, Sum or Adasum. Adasum combines the ranks' steps instead of their gradients:
            each rank steps on its own gradients first.
        gradient_predivide_factor: factor f: with Average, gradients are divided by f before the
            sum and by size / f after it.
        num_groups: deprecated; equivalent to passing a number as `groups`.
        groups: number of groups of gradients that are reduced together, or lists of parameters.
        sparse_as_dense: convert sparse gradients to dense ones instead of gathering their
            elements; `sharded` does so, too.
        process_set: ranks that take part; other ranks step on their own gradients.
        exchange: algorithm that replaces the reduction of gradients, or that combines weights
            after local steps: text such as "powersgd:rank=4", or an object, which must not be
            shared with another optimizer.
        sharded: whether ranks share the optimizer's work and its state: each updates a slice of the
            weights for the others, those of its node or, without shared memory, all. Between
            backward() and step() gradients are then those of this rank: clip them with
            `clip_grad_norm_`, or call synchronize() before using them. step() removes gradients.
            Muon, LARS and LAMB are shared by whole parameters instead, with gradients as usual.

    Raises:
        UnsupportedError: `sharded` with an optimizer that cannot be shared, with parameters
            whose memory cannot be shared, or where the job continues without ranks that end.
        TypeError: `optimizer` is not an optimizer, or `exchange` neither an exchange nor
            text.
        ValueError: names are missing or used twice, or arguments contradict each other.
        MismatchError: the ranks have different models.
    """

    @collective
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: type[Compressor] = Compressor,
        backward_passes_per_step: int = 1,
        op: ReduceOp | None = ReduceOp.AVERAGE,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Groups = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        exchange: Exchange | str | None = None,
        sharded: bool = False,
    ) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            raise ValueError("the optimizer is a DistributedOptimizer already")
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"expected an optimizer of torch, got {type(optimizer).__name__}")
        op = choose_op(op, None)
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
            raise ValueError(f"op must be Average, Sum or Adasum, got {op}")
        groups = choose_groups(num_groups, groups)
        check_groups(groups, torch.Tensor)
        kind = "none"
        if compression is not Compressor:
            from hvdtrain.torch.compression import Compression

            kind = Compression.name_of(compression)
        other = op is ReduceOp.ADASUM or kind in ("fp16", "bf16")
        if sharded and (exchange is not None or other):
            raise ValueError(
                "sharded=True works with op=Average and op=Sum only: leave out sharded, or "
                "exchange, compression and Adasum"
            )
        whole = False
        if sharded:
            check_sharding()
            from hvdtrain.torch.sharding.segment_optimizer import needs_whole

            whole = needs_whole(optimizer)
        settings = ParameterSettings(
            op,
            process_set,
            gradient_predivide_factor,
            groups,
            sparse_as_dense or whole,
            choose_exchange(exchange, op, gradient_predivide_factor, kind),
            passes=backward_passes_per_step,
            compressor=compression if kind == "own" else None,
            sharded=sharded and not whole,
            shares_whole=whole,
        )
        super().__init__(optimizer)
        names = name_parameters(optimizer, named_parameters)
        self._exchanged = Exchanged(optimizer, names, settings)
        self._steps: TorchSharedSteps | None = None
        if sharded:
            from hvdtrain.torch.sharding.shared_steps import TorchSharedSteps

            self._steps = TorchSharedSteps(optimizer, self._exchanged)
        warn_of_torch_layers(parameters_of(optimizer))
        self._synchronized = False
        self._clipped = False
        self._skips = False
        self._takes_steps = context.current().config.torch_steps
        self._kernel: KernelSteps | None = None  # ranks that share steps may stop doing so

    @property
    def _shared(self) -> TorchSharedSteps | None:
        """The steps that ranks share; None if each takes all of them."""
        return self._steps if self._steps is not None and self._steps.active else None

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]
        """False; the first that GradScaler.step() asks for, before it changes gradients."""
        if self._steps is not None:
            self._steps.check_whole()
        return False

    @property
    def pending(self) -> bool:
        """Whether backward() has computed gradients that are not reduced yet (local)."""
        gradients = self._exchanged.gradients
        return gradients is not None and gradients.open

    @property
    def sharded(self) -> bool:
        """Whether ranks share the optimizer's work (local)."""
        return self._shared is not None

    @property
    def sample_weight(self) -> float | None:
        """Weight c_r of this rank in the average of the next steps: its number of samples.

        The gradient of the step is sum_r(c_r g_r) / sum_r(c_r), where g_r is the gradient of
        rank r's mean loss. A rank without samples sets 0, skips backward() and calls step(); a
        rank that has joined has weight 0. If it is None on all ranks, the gradient is the plain
        average over ranks. It is read when the first gradients of a step leave, in backward(), and
        step() raises a RuntimeError if it was changed after that. An exchange of weights counts a
        rank with all samples that it had since the weights of all ranks were equal, or with its
        steps since then.

        Raises:
            ValueError: the weight is negative or not finite, `op` is not Average, or the exchange
                counts all ranks alike.
        """
        return self._exchanged.weight

    @sample_weight.setter
    def sample_weight(self, weight: float | None) -> None:
        number = None if weight is None else float(weight)
        self._exchanged.settings.check_sample_weight(number)
        self._exchanged.weight = number

    def scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradients by a factor, between clip_grad_norm_() and step() (local).

        Args:
            factor: factor, equal on all ranks.
        """
        if self._shared is not None and not self._shared.kept:
            self._shared.scale(torch.tensor(factor, dtype=torch.float64, device="cpu"))
            return
        gradients = [p.grad for p in parameters_of(self._optimizer) if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the program, for an exchange that keeps parts of gradients.

        What a compression loses in one step is added in the next one, for which the loss may have
        another scale. Set it before the first step; other exchanges do not need it.
        """
        return self._exchanged.scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._exchanged.scaler = scaler

    @property
    def exchange(self) -> Exchange | None:
        """The exchange; None for the default average or sum."""
        return self._exchanged.settings.exchange

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all ranks were equal (local).

        Always true with an exchange of gradients. Otherwise evaluate, save and compare the model
        of one rank only where it is true, as after flush().
        """
        return self._exchanged.synchronized

    @disable_compile
    @collective
    def flush(self) -> None:
        """Exchange weights now if those of any rank have changed since all were equal (collective).

        Afterwards all ranks have the same bits. With an exchange of gradients it does nothing.
        Ranks may have taken different numbers of steps: a rank takes part in the exchanges of the
        others until all call flush().
        """
        if self._exchanged.weights is not None:
            self._exchanged.weights.flush()

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes accumulated before a reduction."""
        return self._exchanged.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes accumulated before a reduction (between steps)."""
        self._exchanged.passes = passes

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks step on their own gradients, and exchange weights afterwards.

        With post-local SGD that is so from its switch on.
        """
        return self._exchanged.exchanges_weights

    def bucket_plan(self) -> dict[str, Any] | None:
        """Return the division of gradients into buckets, as plain data for a checkpoint (local).

        The rounding of sums over three or more ranks depends on it where MPI adds. The plan
        follows the order in which the gradients of the first step arrive; before, it is None.
        """
        gradients = self._exchanged.gradients
        return None if gradients is None else gradients.layout

    @collective
    def use_bucket_plan(self, plan: Mapping[str, Any] | None) -> None:
        """Divide gradients into buckets as an earlier run did (collective, before the first step).

        Args:
            plan: result of bucket_plan(); the one on the process set's first rank is used, and
                None changes nothing.

        Raises:
            ValueError: the plan is for other parameters.
            RuntimeError: a step has begun.
        """
        if self._exchanged.gradients is not None:
            self._exchanged.gradients.use_layout(plan)

    def exchange_state(self) -> SavedExchange:
        """Return the state of the exchange and the number of steps, for a checkpoint (local).

        A checkpoint needs that of each rank, because `own` differs between ranks.

        Raises:
            RuntimeError: this rank has taken steps since the weights of all ranks were equal.
        """
        return self._exchanged.save()

    def load_exchange_state(self, state: SavedExchange) -> None:
        """Restore the state of the exchange, when the model and the optimizer are restored (local).

        It is collective for an exchange that begins with averages of gradients, as post-local SGD.

        Args:
            state: the state that this same rank saved. If the number of ranks has changed, any
                rank's state: each rank's private part is then reset, and rank 0 logs this.

        Raises:
            ValueError: it is the state of another exchange.
        """
        self._exchanged.load(state)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state, whole on each rank (local).

        With sharded=True ranks share it, and the first access after a step brings it together,
        which takes memory and time. Where they share no memory that is collective.
        """
        if self._steps is not None:
            self._steps.give_back()
        return self._optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, whole on each rank (local).

        With sharded=True it is collective where ranks share no memory, unless
        consolidate_state_dict() was called since the last step.

        Raises:
            MismatchError: other ranks have not called it, but take a step.
        """
        return self._optimizer.state_dict() if self._steps is None else self._steps.state_dict()

    @collective
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state to one rank, on which state_dict() is then local (collective).

        It lasts until the next step, and does nothing where each rank has the state or reads it in
        memory of the node. Ranks that do not take part need not call it.

        Args:
            to: rank of the world, which takes part.

        Raises:
            MismatchError: other ranks have not called it, but take a step.
            ValueError: the rank does not take part.
        """
        members = self._exchanged.settings.process_set
        if self._steps is not None and members.included():
            ranks = members.channel().ranks
            if to not in ranks:
                raise ValueError(f"consolidate_state_dict: rank {to} is not one of {list(ranks)}")
            self._steps.consolidate(ranks.index(to))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, whole on each rank (local)."""
        if self._steps is not None:
            self._steps.discard_state()
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer, whose methods find reduced gradients.

        Such a method, as SAM's first_step(), reduces gradients that are complete before it runs
        (then collective). Those of every optimizer of torch use no gradients.
        """
        value = super().__getattr__(name)
        own = inspect.ismethod(value) and value.__self__ is self._optimizer
        if not own or hasattr(torch.optim.Optimizer, name):
            return value

        @wraps(value)
        def call(*arguments: Any, **named: Any) -> Any:
            self._reduce_complete()
            return value(*arguments, **named)

        return call

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The names of the parameters, in the attribute where Horovod's scripts look for them."""
        return {p: self._exchanged.names[id(p)] for p in parameters_of(self._optimizer)}

    @disable_compile
    @collective
    def synchronize(self) -> None:
        """Reduce all gradients not reduced yet, so that step() does not (collective)."""
        gradients = self._exchanged.gradients
        if gradients is not None:
            check_reduced(self._optimizer, gradients.parameters)
            self._reduce_now(gradients)
            if self._shared is not None:
                self._shared.keep_gradients()
        self._make_dense()
        self._synchronized = True

    def _make_dense(self) -> None:
        """Make gradients dense on a rank that takes no part, as reducing them does on others."""
        settings = self._exchanged.settings
        dense = settings.sparse_as_dense or settings.sharded
        if not dense or self.exchanges_weights or settings.process_set.included():
            return
        for parameter in parameters_of(self._optimizer):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    @collective
    def _reduce_complete(self) -> None:
        """Reduce gradients for the wrapped optimizer's own code, if backward() has ended.

        Collective then.
        """
        gradients = self._exchanged.gradients
        if gradients is not None and gradients.any_complete:
            self.synchronize()
            self._synchronized, self._clipped = False, True  # step() then says nothing of it

    def _is_reduced(self, gradients: Gradients) -> bool:
        """Return whether gradients are results: not if the program has removed all results."""
        if gradients.open or not (self._synchronized or self._clipped):
            return False
        return any(parameter.grad is not None for parameter in gradients.parameters)

    @collective
    def _reduce_now(self, gradients: Gradients) -> None:
        if self._steps is None:
            gradients.reduce()
        else:
            self._steps.reduce()

    @disable_compile
    @collective
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the reduced gradients so that their norm is at most `max_norm` (collective).

        Call it between backward() and step(). It does what torch.nn.utils.clip_grad_norm_ does with
        the gradients of all ranks, which with sharded=True only it can.

        Args:
            max_norm: maximum norm.
            norm_type: p of the norm, which may be inf.
            error_if_nonfinite: whether to raise an error if the norm is not finite.

        Returns:
            Norm of all gradients before, [].

        Raises:
            ValueError: ranks exchange weights, and never reduce gradients.
            RuntimeError: the norm is not finite, and an error was wanted.
        """
        gradients, shared = self._exchanged.gradients, self._shared
        if self.exchanges_weights:
            raise ValueError("clip_grad_norm_ needs an exchange of gradients, not of weights")
        if gradients is not None and not self._is_reduced(gradients):
            check_reduced(self._optimizer, gradients.parameters)
            self._reduce_now(gradients)
            self._clipped = True
        self._make_dense()
        if shared is None or shared.kept:
            # torch has no largest of no elements.
            parameters = [each for each in parameters_of(self._optimizer) if each.numel()]
            return torch.nn.utils.clip_grad_norm_(
                parameters, max_norm, norm_type, error_if_nonfinite
            )
        return shared.clip(max_norm, float(norm_type), error_if_nonfinite)

    @disable_compile
    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which step() does not reduce gradients, for use after synchronize().

        Raises:
            AssertionError: op=Adasum or another exchange of weights is used, where step() itself
                is the reduction.
        """
        if self.exchanges_weights:
            raise AssertionError(
                "with op=Adasum, and all else that exchanges weights, step() is the reduction: it "
                "cannot be skipped"
            )
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    @disable_compile
    @collective
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the reduced gradients, also in each evaluation of a closure (collective).

        A closure's loss is averaged over the ranks as gradients are, with sample weights, or summed
        with op=Sum, so that a line search takes the same steps on all. Optimizers of torch other
        than LBFGS do not look at it: their step() returns the loss of this rank, as Horovod does.
        """
        gradients, weights = self._exchanged.gradients, self._exchanged.weights
        if closure is not None and not is_of_torch(self._optimizer) and gradients is not None:
            # What backward() sent before the closure has the weight of that time.
            weight, gradients.weight = gradients.weight, gradients.sent_weight
            try:
                self._reduce_complete()
            finally:
                gradients.weight = weight
        if weights is not None:
            weights.prepare_step()
            loss = self._step_alone(closure)
            weights.end_step()
            return loss
        if self._steps is not None:
            return self._step_shared(self._steps, closure)
        if closure is None:
            self._reduce()
            loss = self._step_alone()
        else:
            loss = self._optimizer.step(partial(self._evaluate, closure))
        self._exchanged.end_gradient_step()
        return loss

    def _step_alone(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step, in the compiled kernel where that has its bits."""
        if closure is None and self._takes_steps:
            self._kernel = self._kernel or KernelSteps(self._optimizer)
            if self._kernel.take():
                return None
        return self._optimizer.step(closure)

    @collective
    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return a closure's loss, with the gradients and the loss of all ranks."""
        with torch.enable_grad():
            loss = closure()
        self._reduce()
        settings = self._exchanged.settings
        if not settings.process_set.included():
            return loss
        if is_of_torch(self._optimizer) and type(self._optimizer) is not torch.optim.LBFGS:
            return loss  # which these do not use
        return loss_of_all_ranks(loss, settings.op, self.sample_weight, settings.process_set)

    @collective
    def _step_shared(self, steps: TorchSharedSteps, closure: Callable[[], Any] | None) -> Any:
        """Step on the gradients that this rank owns, if the ranks share the work."""
        loss = None
        if closure is None:
            self._reduce()
        else:
            loss = self._evaluate(closure)
        if steps.active:
            steps.step()
        else:
            self._step_alone()
        return loss

    @collective
    def _reduce(self) -> None:
        if self._synchronized and not self._skips:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): the gradients are reduced once, but Horovod would "
                "reduce them twice. Call it within `with optimizer.skip_synchronize():`",
                stacklevel=6,  # step(), and the three functions of disable_compile()
            )
        gradients = self._exchanged.gradients
        # With the ranks' work shared, a step on gradients that are not reduced is never meant.
        skips = self._skips and not (self._steps is not None and gradients and gradients.open)
        if gradients is not None and not skips:
            check_reduced(self._optimizer, gradients.parameters)
            if not self._is_reduced(gradients):
                self._reduce_now(gradients)
        self._make_dense()
        if gradients is not None:
            gradients.note_removed()
        self._synchronized = self._clipped = False
        if isinstance(self._optimizer, torch.optim.SparseAdam):
            for parameter in parameters_of(self._optimizer):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)  # SparseAdam takes no others

    @disable_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those that have arrived since the last step."""
        gradients = self._exchanged.gradients
        if gradients is not None:
            gradients.buckets.refuse_capture()
            if gradients.open:
                gradients.drop()
            gradients.forget_results()
        self._synchronized = self._clipped = False
        self._optimizer.zero_grad(set_to_none=set_to_none)

    @collective
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to optimize, named by numbers (collective).

        Those that are frozen then, new or not, need another DistributedOptimizer to be trained.

        Raises:
            RuntimeError: ranks have taken local steps since weights were last exchanged.
        """
        self._exchanged.check_synchronized("add_param_group")
        if self._steps is not None:
            self._steps.give_back()
        self._optimizer.add_param_group(param_group)
        numbered = name_parameters(self._optimizer, None)
        self._exchanged.replan({**numbered, **self._exchanged.names})
        if self._steps is not None:
            self._steps.follow()
