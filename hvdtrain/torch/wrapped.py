"""An optimizer that owns nothing but another one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["WrappedOptimizer"]


class WrappedOptimizer(torch.optim.Optimizer):
    """Hands everything on to the wrapped optimizer; it is an Optimizer for schedulers' sake.

    Args:
        optimizer: keeps its state, parameter groups and hooks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Optimizer.__init__ would build groups of its own; all of that belongs to the wrapped.
        self._optimizer = optimizer

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self._optimizer.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register on the wrapped optimizer; the hook sees reduced gradients."""
        return self._optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register on the wrapped optimizer."""
        return self._optimizer.register_step_post_hook(hook)

    def __getattr__(self, name: str) -> Any:
        """Find what the wrapped optimizer has beside all this."""
        if name == "_optimizer":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"
