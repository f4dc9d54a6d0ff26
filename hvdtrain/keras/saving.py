"""Saved models, to go on training on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdtrain.keras.backends.compression import Compression, Compressor
from hvdtrain.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model whose optimizer, with its state, is a DistributedOptimizer (local).

    Args:
        filepath: what `model.save` wrote, with a DistributedOptimizer or without.
        custom_optimizers: classes that Keras does not have.
        custom_objects: further names for Keras.
        compression: as of DistributedOptimizer.
        legacy_opts: for Horovod's sake; only False goes.

    Raises:
        ValueError: legacy_opts is True, or as for keras.saving.load_model.
    """
    if legacy_opts:
        raise ValueError("legacy_opts: Keras 3 has no legacy optimizers")
    known = {kind.__name__: kind for kind in custom_optimizers or []} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
        if keras.backend.backend() == "tensorflow":
            model.jit_compile = False  # as `compile` would have resolved it
    return model
