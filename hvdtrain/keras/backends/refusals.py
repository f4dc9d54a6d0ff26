"""What does not go with an exchange of weights in Keras."""

from __future__ import annotations

import keras

from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.inner_state import InnerState

# Optimizers of keras.optimizers, some of which only later versions have.
_REASONS = {
    "ScheduleFreeAdamW": "whose state begins with the weights",
    "LossScaleOptimizer": "whose inner optimizer counts all of its steps",
}


def refuse_weights(settings: GradientSettings, optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse what does not go with an exchange of weights in Keras."""
    exchange = settings.exchange
    if exchange is None or exchange.inner_state is not InnerState.RESET:
        return
    for name, reason in _REASONS.items():
        if isinstance(optimizer, getattr(keras.optimizers, name, ())):
            raise ValueError(
                f"exchange {exchange.spec!r} cannot reset the state of {name}, {reason}: give "
                "state=keep or state=average"
            )
