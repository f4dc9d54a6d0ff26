"""Learning rates: scaled by the world size, with a gradual warm-up. Pure formulas."""

from __future__ import annotations

import math

__all__ = ["SCALINGS", "scaled_lr", "warmup_lr"]

SCALINGS = ("linear", "sqrt", "none")


def scaled_lr(base_lr: float, size: int, scaling: str) -> float:
    """Return the learning rate for `size` ranks.

    linear: base * N, for SGD while N steps of base are close to one step of N * base;
    sqrt: base * sqrt(N), which keeps the covariance of the update, usual for Adam;
    none: base.

    Args:
        base_lr: the rate for one rank.
        size: the number of ranks N.
        scaling: one of SCALINGS.
    """
    factors = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    return base_lr * factors[scaling]


def warmup_lr(
    step: int, steps_per_epoch: int, base_lr: float, target_lr: float, warmup_epochs: float
) -> float:
    """Return the learning rate of one step, counted from 0 over all epochs.

    Horovod's warm-up, per step from base to target: with k = target / base, W warm-up epochs
    and x = (step + 1) / steps_per_epoch,

        lr = target / k * (x * (k - 1) / W + 1)    while x < W, target from then on.

    The last step of the warm-up has exactly the target; without scaling k is 1 and the rate
    is constant.
    """
    epochs_done = (step + 1) / steps_per_epoch
    if epochs_done >= warmup_epochs or base_lr == target_lr:
        return target_lr
    factor = target_lr / base_lr
    return target_lr / factor * (epochs_done * (factor - 1) / warmup_epochs + 1)
