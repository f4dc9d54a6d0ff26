"""The optimizer wrapper: the user's optimizer, stepping on gradients of all ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.arguments import (
    Groups,
    check_groups,
    check_sharding,
    choose_exchange,
    choose_groups,
    choose_op,
)
from hvdtrain.core.compression import Compressor
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.torch.compression import Compression
from hvdtrain.torch.exchanging_optimizer import ExchangingOptimizer, OptimizerWrapper
from hvdtrain.torch.gradients.gradients import Gradients
from hvdtrain.torch.gradients.views import ParameterSettings
from hvdtrain.torch.operations.allreduce import allreduce
from hvdtrain.torch.sharding.kernel_step import KernelSteps
from hvdtrain.torch.sharding.segment_optimizer import needs_whole
from hvdtrain.torch.sharding.shared_steps import TorchSharedSteps
from hvdtrain.torch.sync_batch_norm import warn_of_torch_layers
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.parts import check_reduced, name_parameters, parameters_of
from hvdtrain.types import ReduceOp

__all__ = ["DistributedOptimizer"]


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class is one of torch.optim, whose step() calls a closure first."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is getattr(
        torch.optim, kind.__name__, None
    )


@collective
def loss_of_all_ranks(
    loss: Any, op: ReduceOp, weight: float | None, process_set: ProcessSet
) -> Any:
    """Return the loss averaged or summed as gradients are."""
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
    counts = is_tensor or isinstance(loss, (int, float))
    share = 0.0 if not counts else 1.0 if weight is None else weight
    own = float(loss.detach() if is_tensor else loss) * share if share else 0.0
    terms = torch.tensor(
        [own, share, not counts, weight is not None], dtype=torch.float64, device="cpu"
    )
    total, shares, lacking, weighted = allreduce(
        terms, name="loss of a closure", op=ReduceOp.SUM, process_set=process_set
    ).tolist()
    if not shares or not (counts or loss is None):
        return loss
    # Without weights, gradients are divided by the number of all ranks, also of those that joined.
    divisor = shares if weighted else len(process_set.channel().ranks) - lacking
    result = total / divisor if op is ReduceOp.AVERAGE else total
    return torch.full_like(loss.detach(), result) if is_tensor else result


class DistributedOptimizer(ExchangingOptimizer):
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
            a class of your own, whose compress() changes gradients before the reduction.
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

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        compression: type[Compressor] = Compression.none,
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
        kind = Compression.name_of(compression)
        other = op is ReduceOp.ADASUM or kind in ("fp16", "bf16")
        if sharded and (exchange is not None or other):
            raise ValueError(
                "sharded=True works with op=Average and op=Sum only: leave out sharded, or "
                "exchange, compression and Adasum"
            )
        whole = sharded and needs_whole(optimizer)
        if sharded:
            check_sharding()
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
        super().__init__(optimizer, name_parameters(optimizer, named_parameters), settings)
        warn_of_torch_layers(parameters_of(optimizer))
        self._synchronized = False
        self._clipped = False
        self._skips = False
        taken = context.current().config.torch_steps
        self._kernel = KernelSteps(optimizer) if taken and self._shared is None else None

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
            self._finish(gradients)
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
        if gradients is not None and gradients.complete:
            self.synchronize()
            self._synchronized, self._clipped = False, True  # step() then says nothing of it

    def _is_reduced(self, gradients: Gradients) -> bool:
        """Return whether gradients are results: not if the program has removed all results."""
        if gradients.open or not (self._synchronized or self._clipped):
            return False
        return any(parameter.grad is not None for parameter in gradients.parameters)

    @collective
    def _finish(self, gradients: Gradients) -> None:
        if self._steps is None:
            gradients.finish()
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
            self._finish(gradients)
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
            weights.before_step()
            loss = self._step_alone(closure)
            weights.after_step()
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
        if closure is None and self._kernel is not None and self._kernel.take():
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
                self._finish(gradients)
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
