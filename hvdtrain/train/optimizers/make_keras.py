"""Makes Keras optimizers by name."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import OptimizerOptions, weight_decay_of

# Names of one-dimensional parameters in Keras's layers.
_NOT_DECAYED = ["bias", "beta", "gamma"]


def keras_optimizer(options: OptimizerOptions, lr: Any) -> Any:
    """Return the optimizer that the options name.

    All of them clip the gradient by its global norm and, as Keras does, subtract the weight decay
    times the learning rate from the weights before the step. LAMB's decay is outside its ratio, and
    excludes biases and normalization.
    """
    optimizers, decay = keras.optimizers, weight_decay_of(options)
    common = {
        "learning_rate": lr,
        # None saves a pass over the weights; but AdamW does not accept None.
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
