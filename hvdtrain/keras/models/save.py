"""What saving a model does where ranks exchange weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from hvdtrain.core import context
from hvdtrain.keras.backends.distributed import distributed_optimizers


def save_model(original: Callable[..., object], arguments: inspect.BoundArguments) -> object:
    """Save a model if it is not one of this rank alone.

    A rank that saves by itself cannot ask others for an exchange: they may not take part.
    """
    optimizers = distributed_optimizers(arguments.arguments["self"])
    if not all(optimizer.synchronized for optimizer in optimizers):
        raise RuntimeError(
            f"{context.current().topology.title} save: the ranks' weights differ until their next "
            "exchange: call optimizer.flush() on all ranks before, or save at the end of an epoch; "
            "in fit give keras.callbacks.ModelCheckpoint(..., save_freq=batches) or "
            "BackupAndRestore, which hvdtrain knows on all ranks"
        )
    return original(*arguments.args, **arguments.kwargs)
