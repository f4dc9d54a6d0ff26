"""Learning rates: scaled by the number of ranks, with warm-up and decay. Pure functions."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

from hvdtrain.errors import UsageError

OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb")


class OptimizerOptions(Protocol):
    """The options that an optimizer is made from."""

    @property
    def optimizer(self) -> str:
        """One of OPTIMIZERS."""

    @property
    def momentum(self) -> float:
        """The momentum of sgd and lars."""

    @property
    def weight_decay(self) -> float | None:
        """The weight decay; None: the optimizer's default."""

    @property
    def clip_norm(self) -> float | None:
        """The maximum norm of a reduced gradient; None: no clipping."""


def weight_decay_of(options: OptimizerOptions) -> float:
    """Return the weight decay of the options; by default 0.01 for adamw, else 0."""
    if options.weight_decay is not None:
        return options.weight_decay
    return 0.01 if options.optimizer == "adamw" else 0.0


SCALINGS = ("linear", "sqrt", "none")
SCHEDULES = ("constant", "step", "cosine", "polynomial")


@dataclass(frozen=True)
class ScheduleSettings:
    """Everything that the learning rate of a step depends on.

    Attributes:
        base_lr: learning rate that the warm-up starts near.
        target_lr: learning rate at the end of the warm-up, which the schedule decays.
        warmup_epochs: length of the warm-up; 0: none.
        milestones: epochs, ascending, at which schedule "step" reduces the rate.
        final_lr: learning rate of the last step with schedules "cosine" and "polynomial".
    """

    steps_per_epoch: int
    steps: int
    base_lr: float
    target_lr: float
    warmup_epochs: float = 0.0
    schedule: str = "constant"
    milestones: tuple[float, ...] = ()
    decay: float = 0.1
    power: float = 1.0
    final_lr: float = 0.0


def learning_rate(step: int, settings: ScheduleSettings) -> float:
    """Return the learning rate of one step.

    During the warm-up it is warmup_lr(). With the target T, the final rate F and t, which runs
    from 0 at the last step of the warm-up (the first step, without one) to 1 at the very last:

        constant    T
        step        T * decay ** (milestones reached), an epoch e being reached at step
                    e * steps_per_epoch: Goyal et al., arXiv:1706.02677; torch's MultiStepLR
        cosine      F + (T - F) * (1 + cos(pi t)) / 2: Loshchilov and Hutter, arXiv:1608.03983,
                    without restarts; torch's CosineAnnealingLR
        polynomial  F + (T - F) * (1 - t) ** power: You et al., arXiv:1708.03888, with power 2;
                    torch's PolynomialLR

    Milestones are epochs of the run, so a warm-up does not move them. If the warm-up is as long as
    the run, nothing decays.
    """
    s = settings
    warm = warmup_lr(step, s.steps_per_epoch, s.base_lr, s.target_lr, s.warmup_epochs)
    if s.schedule == "constant" or (step + 1) / s.steps_per_epoch < s.warmup_epochs:
        return warm
    if s.schedule == "step":
        reached = bisect_right(s.milestones, step / s.steps_per_epoch)
        factor: float = s.decay**reached
        return s.target_lr * factor
    part = _part_done(step, s)
    if s.schedule == "cosine":
        return s.final_lr + (s.target_lr - s.final_lr) * (1 + math.cos(math.pi * part)) / 2
    left: float = (1 - part) ** s.power
    return s.final_lr + (s.target_lr - s.final_lr) * left


def _part_done(step: int, settings: ScheduleSettings) -> float:
    """Return t of learning_rate(), from 0 to 1."""
    # The factor compensates for a product that was rounded up.
    warmup_steps = math.ceil(settings.warmup_epochs * settings.steps_per_epoch * (1 - 1e-12))
    first, last = max(warmup_steps - 1, 0), settings.steps - 1
    if last <= first:
        return 0.0
    return min(max((step - first) / (last - first), 0.0), 1.0)


def parse_milestones(text: str) -> tuple[float, ...]:
    """Return the epochs in a text such as "30,60,80"; none for an empty text."""
    try:
        milestones = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        milestones = (math.nan,)
    ascending = all(a < b for a, b in zip((0.0, *milestones), milestones, strict=False))
    if not ascending or not all(map(math.isfinite, milestones)):
        raise UsageError(
            f"--milestones must be ascending epochs with commas, such as 30,60,80, got {text!r}"
        )
    return milestones


def scaled_lr(base_lr: float, size: int, scaling: str) -> float:
    """Return the learning rate for `size` ranks.

    linear: base * N, for SGD while N steps of base are close to one step of N * base;
    sqrt: base * sqrt(N), which keeps the covariance of the update, usual for Adam;
    none: base.
    """
    factors = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    return base_lr * factors[scaling]


def warmup_lr(
    step: int, steps_per_epoch: int, base_lr: float, target_lr: float, warmup_epochs: float
) -> float:
    """Return the learning rate of one step of Horovod's warm-up.

    With k = target / base, W warm-up epochs and x = (step + 1) / steps_per_epoch,

        lr = target / k * (x * (k - 1) / W + 1)    while x < W, target from then on.

    The last step of the warm-up has exactly the target; without scaling k is 1 and the rate
    is constant.
    """
    epochs_done = (step + 1) / steps_per_epoch
    if epochs_done >= warmup_epochs or base_lr == target_lr:
        return target_lr
    factor = target_lr / base_lr
    return target_lr / factor * (epochs_done * (factor - 1) / warmup_epochs + 1)
