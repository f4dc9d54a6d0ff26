"""The optimizer wrapper: the user's optimizer, stepping on gradients of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hvdtrain.core.arguments import (
    Groups,
    check_groups,
    choose_exchange,
    choose_groups,
    choose_op,
)
from hvdtrain.core.exchanges.saved import SavedExchange, load_exchange, save_exchange
from hvdtrain.core.gradients.exchange import Exchange, Kind, LocalSteps
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.torch.gradients.gradients import Gradients
from hvdtrain.torch.gradients.settings import ParameterSettings
from hvdtrain.torch.gradients.weights import Weights
from hvdtrain.torch.operations.compression import Compression, Compressor, compression_name
from hvdtrain.torch.operations.divergence import note_wrapped
from hvdtrain.torch.optimizer_wrapper import OptimizerWrapper
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.parameters import check_reduced, name_parameters, parameters_of, rate_of
from hvdtrain.types import ReduceOp

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
            elements.
        process_set: ranks that take part; other ranks step on their own gradients.
        exchange: algorithm that replaces the reduction of gradients, or that combines weights
            after local steps: text such as "powersgd:rank=4", or an object, which must not be
            shared with another optimizer.

    Raises:
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
        kind = compression_name(compression)
        self._settings = ParameterSettings(
            op,
            process_set,
            gradient_predivide_factor,
            groups,
            sparse_as_dense,
            choose_exchange(exchange, op, gradient_predivide_factor, kind),
            passes=backward_passes_per_step,
            compressor=compression if kind == "own" else Compression.none,
        )
        super().__init__(optimizer)
        self._names = name_parameters(optimizer, named_parameters)
        self._gradients: Gradients | None = None
        self._weights: Weights | None = None
        self._plan()
        self._synchronized = False
        self._skips = False

    def _plan(self) -> None:
        """Plan the exchange of gradients or weights on the ranks that take part (collective)."""
        note_wrapped(self._optimizer)
        if not self._settings.process_set.included():
            return
        trainable = [
            (self._names[id(p)], p) for p in parameters_of(self._optimizer) if p.requires_grad
        ]
        settings = self._settings
        if self.exchanges_weights:
            self._weights = Weights(self._optimizer, trainable, settings)
        else:
            if settings.exchange is not None and settings.exchange.first is not None:
                settings = replace(settings, exchange=settings.exchange.first)
            rate = partial(rate_of, self._optimizer)
            self._gradients = Gradients(trainable, settings, rate)

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The names of the parameters, in the attribute where Horovod's scripts look for them."""
        return {p: self._names[id(p)] for p in parameters_of(self._optimizer)}

    @property
    def sample_weight(self) -> float | None:
        """Weight c_r of this rank in the average of the next steps: its number of samples.

        The gradient of the step is sum_r(c_r g_r) / sum_r(c_r), where g_r is the gradient of
        rank r's mean loss. A rank without samples sets 0, skips backward() and calls step(); a
        rank that has joined has weight 0. If it is None on all ranks, the gradient is the plain
        average over ranks. An exchange of weights counts a rank with all samples that it had
        since the weights of all ranks were equal, or with its steps since then.

        Raises:
            ValueError: the weight is negative or not finite, or `op` is not Average.
        """
        exchanged = self._gradients or self._weights
        return None if exchanged is None else exchanged.sample_weight

    @sample_weight.setter
    def sample_weight(self, weight: float | None) -> None:
        if weight is not None and not 0 <= weight < float("inf"):
            raise ValueError(f"sample_weight must be a finite number >= 0, got {weight}")
        if self._settings.op is not ReduceOp.AVERAGE:
            raise ValueError("sample_weight needs op=Average")
        exchanged = self._gradients or self._weights
        if exchanged is not None:
            exchanged.sample_weight = None if weight is None else float(weight)

    @property
    def synchronized(self) -> bool:
        """Whether this rank has taken no step since the weights of all ranks were equal (local).

        Always true with an exchange of gradients. Otherwise evaluate, save and compare the model
        of one rank only where it is true, as after flush().
        """
        return self._weights is None or self._weights.synchronized

    @disable_compile
    def flush(self) -> None:
        """Exchange weights now if those of any rank have changed since all were equal (collective).

        Afterwards all ranks have the same bits. With an exchange of gradients it does nothing.
        Ranks may have taken different numbers of steps: a rank takes part in the exchanges of the
        others until all call flush().
        """
        if self._weights is not None:
            self._weights.flush()

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes accumulated before a reduction."""
        return self._settings.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes accumulated before a reduction (between steps)."""
        self._settings = replace(self._settings, passes=passes)
        if self._gradients is not None:
            self._gradients.passes = passes

    @property
    def exchanges_weights(self) -> bool:
        """Whether ranks step on their own gradients, and exchange weights afterwards.

        With post-local SGD that is so from its switch on.
        """
        exchange = self._settings.exchange
        return exchange is not None and exchange.kind is Kind.WEIGHTS and exchange.first is None

    def bucket_plan(self) -> dict[str, Any] | None:
        """Return the division of gradients into buckets, as plain data for a checkpoint (local).

        The rounding of sums over three or more ranks depends on it where MPI adds. The plan
        follows the order in which the gradients of the first step arrive; before, it is None.
        """
        return None if self._gradients is None else self._gradients.layout

    def use_bucket_plan(self, plan: Mapping[str, Any] | None) -> None:
        """Divide gradients into buckets as an earlier run did (collective, before the first step).

        Args:
            plan: result of bucket_plan(); the one on the process set's first rank is used, and
                None changes nothing.

        Raises:
            ValueError: the plan is for other parameters.
            RuntimeError: a step has begun.
        """
        if self._gradients is not None:
            self._gradients.use_layout(plan)

    def exchange_state(self) -> SavedExchange:
        """Return the state of the exchange and the number of steps, for a checkpoint (local).

        A checkpoint needs that of each rank, because `own` differs between ranks.

        Raises:
            RuntimeError: this rank has taken steps since the weights of all ranks were equal.
        """
        if not self.synchronized:
            raise RuntimeError(
                "the ranks' weights differ until their next exchange: call flush() before "
                "exchange_state()"
            )
        exchanged = self._gradients or self._weights
        steps = 0 if exchanged is None else exchanged.steps
        return save_exchange(self._settings.make_exchange(), steps)

    def load_exchange_state(self, state: SavedExchange) -> None:
        """Restore the state of the exchange, when the model and the optimizer are restored (local).

        It is collective for an exchange that begins with averages of gradients, as post-local SGD.

        Args:
            state: result of exchange_state() on the rank of the same number. On another number of
                ranks pass `own` empty: what each rank kept for itself then begins anew.

        Raises:
            ValueError: it is the state of another exchange.
        """
        exchanged = self._gradients or self._weights
        steps = load_exchange(self._settings.make_exchange(), state)
        if exchanged is not None:
            exchanged.steps = steps
        self._follow_exchange()
        if self._weights is not None:
            self._weights.begin_anew()

    @disable_compile
    def synchronize(self) -> None:
        """Reduce all gradients not reduced yet, so that step() does not (collective)."""
        if self._gradients is not None:
            check_reduced(self._optimizer, self._gradients.parameters)
            self._gradients.finish()
        self._synchronized = True

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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the reduced gradients, also in each evaluation of a closure (collective)."""
        if self._weights is not None:
            self._weights.before_step()
            loss = self._optimizer.step(closure)
            self._weights.after_step()
            return loss
        if closure is None:
            self._reduce()
            loss = self._optimizer.step()
            self._end_gradient_step()
            return loss

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._reduce()
            return loss

        loss = self._optimizer.step(reduced)
        self._end_gradient_step()
        return loss

    def _end_gradient_step(self) -> None:
        """Let an exchange of weights that begins with averages of gradients end these."""
        exchange = self._settings.exchange
        if self._gradients is not None and exchange is not None and exchange.first is not None:
            exchange.due(LocalSteps(1, None, self._gradients.steps, rate_of(self._optimizer)))
            self._follow_exchange()

    def _follow_exchange(self) -> None:
        """Exchange what the exchange wants at present (collective if that has changed)."""
        exchanged = self._gradients or self._weights
        if exchanged is not None and self.exchanges_weights != (exchanged is self._weights):
            self._gradients = self._weights = None
            self._replan(exchanged)

    def _replan(self, before: Gradients | Weights | None) -> None:
        """Plan anew, and go on with the steps and sample weight of before (collective)."""
        self._plan()
        after = self._weights or self._gradients
        if before is not None and after is not None:
            after.steps = before.steps
            after.sample_weight = before.sample_weight

    def _reduce(self) -> None:
        if self._synchronized and not self._skips:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(): the gradients are reduced once, but Horovod would "
                "reduce them twice. Call it within `with optimizer.skip_synchronize():`",
                stacklevel=6,  # step(), and the three functions of disable_compile()
            )
        if self._gradients is not None and not self._skips:
            check_reduced(self._optimizer, self._gradients.parameters)
            if not self._synchronized or self._gradients.open:
                self._gradients.finish()
        self._synchronized = False
        if isinstance(self._optimizer, torch.optim.SparseAdam):
            for parameter in parameters_of(self._optimizer):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)  # SparseAdam takes no others

    @disable_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, also those that have arrived since the last step."""
        if self._gradients is not None:
            self._gradients.refuse_capture()
            if self._gradients.open:
                self._gradients.drop()
        self._synchronized = False
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to optimize, named by numbers (collective).

        Raises:
            RuntimeError: ranks have taken local steps since weights were last exchanged.
        """
        if self._weights is not None and not self._weights.synchronized:
            raise RuntimeError(
                "the ranks' weights differ until their next exchange: call flush() before "
                "add_param_group()"
            )
        self._optimizer.add_param_group(param_group)
        self._names = name_parameters(self._optimizer, None) | self._names
        self._replan(self._weights or self._gradients)
