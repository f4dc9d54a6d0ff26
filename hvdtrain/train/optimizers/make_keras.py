"""Make an optimizer of Keras from its name."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.choice import OptimizerOptions, weight_decay_of

__all__ = ["keras_optimizer"]

# What Keras calls the parameters of one dimension in its layers.
_NOT_DECAYED = ["bias", "beta", "gamma"]


def keras_optimizer(options: OptimizerOptions, lr: Any) -> Any:
    """Return the optimizer that the options name (local).

    All of them clip the gradient by its global norm, and take the weight decay, times the rate,
    off the weights before the step, as Keras does; LAMB's stands outside its ratio, and leaves
    biases and normalisations alone.

    Args:
        options: of the run.
        lr: a learning rate, or a schedule of Keras.

    Raises:
        UsageError: Keras has no such optimizer.
    """
    optimizers, decay = keras.optimizers, weight_decay_of(options)
    common = {
        "learning_rate": lr,
        # Without one there is no pass over the weights; but AdamW takes no None.
        "weight_decay": decay if decay or options.optimizer == "adamw" else None,
        "global_clipnorm": options.clip_norm,
        "name": "optimizer",
    }
    match options.optimizer:
        case "sgd":
            return optimizers.SGD(momentum=options.momentum, **common)
        case "adam":
            return optimizers.Adam(epsilon=1e-8, **common)
        case "adamw":
            return optimizers.AdamW(epsilon=1e-8, **common)
        case "lamb":
            optimizer = optimizers.Lamb(epsilon=1e-6, **common)
            optimizer.exclude_from_weight_decay(var_names=_NOT_DECAYED)
            return optimizer
    raise UsageError(
        f"--optimizer {options.optimizer} goes with --framework torch only: Keras has sgd, adam, "
        "adamw and lamb"
    )
