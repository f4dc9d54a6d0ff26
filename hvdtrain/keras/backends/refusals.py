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
        ValueError: the exchange is to reset a state that it cannot reset.
    """
    exchange = settings.exchange
    if exchange is None or exchange.inner_state is not InnerState.RESET:
        return
    reasons = {
        keras.optimizers.ScheduleFreeAdamW: "whose state begins with the weights",
        keras.optimizers.LossScaleOptimizer: "whose inner optimizer counts all of its steps",
    }
    for kind, reason in reasons.items():
        if isinstance(optimizer, kind):
            raise ValueError(
                f"exchange {exchange.spec!r} cannot reset the state of {kind.__name__}, {reason}: "
                "give state=keep or state=average"
            )
