"""The loss that a closure returns to an optimizer, as that of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.torch.operations.allreduce import allreduce
from hvdtrain.types import ReduceOp


def uses_loss(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step may depend on the loss, as with LBFGS and what is not torch's own."""
    kind = type(optimizer)
    own = kind.__module__.startswith("torch.optim.") and kind is getattr(
        torch.optim, kind.__name__, None
    )
    return not own or kind is torch.optim.LBFGS


@collective
def loss_of_all_ranks(
    loss: Any, op: ReduceOp, weight: float | None, process_set: ProcessSet
) -> Any:
    """Return the loss averaged or summed as gradients are."""
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
    counts = is_tensor or isinstance(loss, (int, float))
    share = 0.0 if not counts else 1.0 if weight is None else weight
    own = float(loss) * share if share else 0.0
    terms = torch.tensor([own, share], dtype=torch.float64, device="cpu")
    total, shares = allreduce(
        terms, name="loss of a closure", op=ReduceOp.SUM, process_set=process_set
    ).tolist()
    if not shares or not (counts or loss is None):
        return loss
    result = total / shares if op is ReduceOp.AVERAGE else total
    return torch.full_like(loss.detach(), result) if is_tensor else result
