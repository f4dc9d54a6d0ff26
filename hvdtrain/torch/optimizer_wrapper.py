"""What passes for the user's optimizer, and what becomes of a closure's loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from hvdtrain.collective import collective
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.types import ReduceOp


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
    from hvdtrain.torch.operations.allreduce import allreduce

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
