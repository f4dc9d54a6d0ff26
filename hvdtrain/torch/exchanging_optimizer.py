"""The optimizer's exchange, as it is read and set between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from hvdtrain.collective import collective
from hvdtrain.core.exchanges.state import SavedExchange
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.torch.gradients.exchanged import Exchanged
from hvdtrain.torch.gradients.views import ParameterSettings
from hvdtrain.torch.sharding.shared_steps import TorchSharedSteps
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.parts import parameters_of


class OptimizerWrapper(torch.optim.Optimizer):
    """Delegates to the wrapped optimizer; it is an Optimizer because schedulers require one.

    For isinstance() it is also an instance of the wrapped optimizer's class, as in Horovod.

    Args:
        optimizer: wrapped optimizer, which keeps its state, parameter groups and hooks.
    """

    # A fused optimizer would not see the scale that GradScaler sets as the wrapper's attribute.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Optimizer.__init__ would make parameter groups; they belong to the wrapped optimizer.
        self._optimizer = optimizer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The wrapped optimizer's class; type() returns the wrapper's own."""
        return self._optimizer.__class__

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook on the wrapped optimizer; the hook sees reduced gradients."""
        return self._optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        return self._optimizer.register_step_post_hook(hook)

    def __getattr__(self, name: str) -> Any:
        """Return other attributes from the wrapped optimizer."""
        if name == "_optimizer":  # not set yet if __init__() raises
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled, because hooks and the connection to ranks cannot be."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: copy or save its state_dict(), "
            "and wrap another optimizer to load it into"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"


class ExchangingOptimizer(OptimizerWrapper):
    """An optimizer of which ranks exchange gradients or weights (collective).

    Args:
        optimizer: wrapped optimizer.
        names: name of each parameter, by id(parameter).
        settings: settings, equal on all ranks.
    """

    @collective
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        settings: ParameterSettings,
    ) -> None:
        super().__init__(optimizer)
        self._exchanged = Exchanged(optimizer, names, settings)
        shares = settings.sharded or settings.shares_whole
        self._steps = TorchSharedSteps(optimizer, self._exchanged) if shares else None

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
