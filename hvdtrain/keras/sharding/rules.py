"""Which of Keras's optimizers can share their work, and how these update an element."""

from __future__ import annotations

import keras

from hvdtrain.core.arrays.update_rules import AdamRule, SgdRule, UpdateRule
from hvdtrain.core.gradient_settings import GradientSettings, check_sharding
from hvdtrain.errors import UnsupportedError

# Settings of Keras's optimizers that concern whole gradients, or keep more than the rules do.
_NOT_SHARED = (
    *("clipnorm", "use_ema", "loss_scale_factor", "gradient_accumulation_steps"),
    "ema_overwrite_frequency",
)


def check_shared(optimizer: keras.optimizers.Optimizer, settings: GradientSettings) -> None:
    """Refuse what does not go with a shared step."""
    check_sharding()
    name, backend = type(optimizer).__name__, keras.backend.backend()
    if backend == "jax":
        raise UnsupportedError(
            "sharded=True: on Keras's backend jax a compiled step holds the optimizer's whole "
            "state: use the backend tensorflow or torch, or sharded=False"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise UnsupportedError(
            "sharded=True: a LossScaleOptimizer, which compile() makes for the policy "
            "mixed_float16, cannot be shared: use the policy mixed_bfloat16, or sharded=False"
        )
    rule_of(optimizer)
    if settings.exchange is not None:
        raise UnsupportedError(
            f"sharded=True: only averages and sums can be shared, not exchange "
            f"{settings.exchange.spec!r}: use sharded=False, or no exchange or compression"
        )
    for setting in _NOT_SHARED:
        if getattr(optimizer, setting, None):
            raise UnsupportedError(
                f"sharded=True: {name} with {setting} cannot be shared: leave out {setting}, or "
                "use sharded=False"
            )


def rule_of(optimizer: keras.optimizers.Optimizer) -> UpdateRule:
    """Return how an optimizer updates an element."""
    kind = getattr(optimizer, "hvdtrain_class", type(optimizer))
    if kind is keras.optimizers.SGD or (kind.__name__ == "SGD" and _is_keras(kind)):
        return SgdRule(float(optimizer.momentum), bool(optimizer.nesterov))
    if kind.__name__ in ("Adam", "AdamW") and _is_keras(kind):
        return AdamRule(
            float(optimizer.beta_1),
            float(optimizer.beta_2),
            float(optimizer.epsilon),
            bool(optimizer.amsgrad),
        )
    raise UnsupportedError(
        f"sharded=True: of Keras's optimizers SGD, Adam and AdamW can be shared, got "
        f"{kind.__name__}: use sharded=False"
    )


def _is_keras(kind: type) -> bool:
    """Return whether a class is Keras's own; on torch it is a subclass for that backend."""
    return kind.__module__.startswith("keras.")
