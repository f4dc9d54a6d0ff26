"""Makes torch optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdtrain.train.optimizers.layerwise import Lamb, Lars
from hvdtrain.train.optimizers.schedule import OptimizerOptions, weight_decay_of


def torch_optimizer(
    options: OptimizerOptions, parameters: Iterable[torch.nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Return the optimizer that the options name.

    As in torch, sgd and adam add the weight decay to the gradient of every parameter, and adamw
    subtracts it from every parameter; lars and lamb decay layers only.
    """
    decay, parameters = weight_decay_of(options), list(parameters)
    # Fused steps read and write each value once: on a CPU Adam takes a fifth of the time. With
    # half types torch 2.13 computes wrong numbers there.
    fused = all(
        parameter.is_floating_point() and not (parameter.is_cpu and parameter.itemsize == 2)
        for parameter in parameters
    )
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
