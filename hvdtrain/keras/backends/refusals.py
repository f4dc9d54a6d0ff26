"""What does not go with an exchange of weights in Keras."""

from __future__ import annotations

import keras

from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.inner_state import InnerState

__all__ = ["refuse_weights"]


def refuse_weights(settings: GradientSettings, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse what does not go with an exchange of weights in Keras (local).

    Args:
        settings: settings of the optimizer.
        optimizer: optimizer of this rank.

    Raises:
        ValueError: the optimizer scales the loss or accumulates gradients, or the exchange is to
            reset a state that depends on the weights.
    """
    exchange = settings.exchange
    if exchange is None or not settings.weights:
        return
    reasons = {
        "a LossScaleOptimizer: leave it out, or use bfloat16": isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ),
        "accumulation of gradients: leave that out, ranks take local steps anyway": bool(
            optimizer.gradient_accumulation_steps
        ),
        "ScheduleFreeAdamW, whose state begins with the weights: give state=keep or average": (
            exchange.inner_state is InnerState.RESET
            and isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"exchange {exchange.spec!r} does not go with {reason}")
