"""An optimizer that owns nothing but another one."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["WrappedOptimizer"]


class WrappedOptimizer(torch.optim.Optimizer):
    """Hands everything on to the wrapped optimizer; it is an Optimizer for schedulers' sake.

    To isinstance() it is of the wrapped optimizer's class, too, as Horovod's wrapper is.

    Args:
        optimizer: keeps its state, parameter groups and hooks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Optimizer.__init__ would build groups of its own; all of that belongs to the wrapped.
        self._optimizer = optimizer

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The wrapped optimizer's class; type() tells the truth."""
        return self._optimizer.__class__

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
        if name == "_optimizer":  # not there yet, while __init__() raises
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: its hooks and its place among the ranks cannot be."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: copy or save its state_dict(), "
            "and wrap another optimizer to load it into"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"
