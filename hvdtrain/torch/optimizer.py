"""The optimizer wrapper: the user's optimizer, stepping on gradients of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvdtrain.torch.gradients import Gradients
from hvdtrain.types import ReduceOp

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """Wrap an optimizer so that it steps on the gradients of all ranks (collective).

    Gradients are reduced in buckets while backward() runs; when it returns, they are reduced,
    so clipping comes naturally between backward() and step(). step() reduces what backward()
    has not brought, zeros included, so a rank without data still calls it.

    Args:
        optimizer: any optimizer of torch; it keeps its state and parameter groups.
        named_parameters: `model.named_parameters()`, for names in messages; without it
            parameters are numbered.
        op: Average or Sum of the ranks' gradients.

    Raises:
        ValueError: names are missing or used twice, or op is neither Average nor Sum.
        MismatchError: the ranks have different models.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        op: ReduceOp = ReduceOp.AVERAGE,
    ) -> None:
        # Optimizer.__init__ would build groups of its own; all of that belongs to the wrapped.
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("the optimizer is a DistributedOptimizer already")
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"op must be Average or Sum, got {op}")
        self._optimizer = optimizer
        self._op = op
        self._names = _names(optimizer, named_parameters)
        self._gradients = self._hook_gradients()
        self._synchronized = False

    def _hook_gradients(self) -> Gradients:
        trainable = [
            (self._names.get(id(p), f"parameter.{i}"), p)
            for i, p in enumerate(_owned(self._optimizer))
            if p.requires_grad
        ]
        return Gradients(trainable, self._op)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's parameter groups."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self._optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self._optimizer.defaults

    @property
    def sample_weight(self) -> float:
        """What this rank counts in the average of the next steps: its number of samples.

        The gradient of the step is sum_r(c_r g_r) / sum_r(c_r), where g_r is the gradient of
        rank r's mean loss; equal weights (the default) give the plain average. A rank without
        samples sets 0, skips backward() and calls step().
        """
        return self._gradients.reducer.sample_weight

    @sample_weight.setter
    def sample_weight(self, weight: float) -> None:
        if not 0 <= weight < float("inf"):
            raise ValueError(f"sample_weight must be a finite number >= 0, got {weight}")
        if self._op is not ReduceOp.AVERAGE:
            raise ValueError("sample_weight needs op=Average")
        self._gradients.reducer.sample_weight = float(weight)

    def synchronize(self) -> None:
        """Reduce every gradient that is not reduced yet (collective); step() then does not."""
        self._gradients.finish()
        self._synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on the reduced gradients (collective), also in each evaluation of a closure."""
        if closure is None:
            self._reduce()
            return self._optimizer.step()

        def reduced() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._reduce()
            return loss

        return self._optimizer.step(reduced)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to optimize, under numbers for names (collective)."""
        self._optimizer.add_param_group(param_group)
        weight = self._gradients.reducer.sample_weight
        self._gradients = self._hook_gradients()
        self._gradients.reducer.sample_weight = weight

    def _reduce(self) -> None:
        self._gradients.check_covers(_owned(self._optimizer))
        if not self._synchronized or self._gradients.open:
            self._gradients.finish()
        self._synchronized = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients; gradients that have come since the last step are dropped."""
        if self._gradients.open:
            self._gradients.finish()
        self._synchronized = False
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self._optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"


def _owned(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _names(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[int, str]:
    """Return the name of each parameter by its id."""
    if named_parameters is None:
        return {}
    named = list(named_parameters)
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has names used twice: {', '.join(twice)}")
    names = {id(p): name for name, p in named}
    owned = _owned(optimizer)
    unnamed = sum(id(p) not in names for p in owned)
    if unnamed:
        raise ValueError(
            f"named_parameters leaves {unnamed} of the optimizer's {len(owned)} parameters "
            "without a name: pass model.named_parameters()"
        )
    return names
