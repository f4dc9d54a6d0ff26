"""Make an optimizer of torch from its name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdtrain.train.optimizers.choice import OptimizerOptions, weight_decay_of
from hvdtrain.train.optimizers.lamb import Lamb
from hvdtrain.train.optimizers.lars import Lars

__all__ = ["torch_optimizer"]


def torch_optimizer(
    options: OptimizerOptions, parameters: Iterable[torch.nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Return the optimizer that the options name (local).

    sgd and adam add the weight decay to the gradient of every parameter, adamw takes it off every
    parameter, as in torch; lars and lamb decay layers alone.

    Args:
        options: of the run; their clip_norm is none of an optimizer's business with torch.
        parameters: of the model.
        lr: the first learning rate.
    """
    decay, parameters = weight_decay_of(options), list(parameters)
    # Each value is read and written once: on a CPU Adam takes a fifth of its time so.
    fused = all(parameter.is_floating_point() for parameter in parameters)
    match options.optimizer:
        case "adam":
            return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=fused)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=fused)
        case "lars":
            return Lars(parameters, lr=lr, momentum=options.momentum, weight_decay=decay)
        case "lamb":
            return Lamb(parameters, lr=lr, weight_decay=decay)
        case "sgd":
            return torch.optim.SGD(
                parameters, lr=lr, momentum=options.momentum, weight_decay=decay, fused=fused
            )
    raise ValueError(f"no optimizer {options.optimizer!r}")
