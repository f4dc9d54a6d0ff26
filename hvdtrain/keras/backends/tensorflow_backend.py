"""Gradients of Keras on TensorFlow: tensors of a graph or eager ones, dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.keras.settings import GradientSettings
from hvdtrain.tensorflow import gradients as tensorflow_gradients
from hvdtrain.tensorflow.autograph import unconverted
from hvdtrain.tensorflow.compression import Compression

__all__ = ["reduce", "unconverted"]

_COMPRESSIONS = {None: Compression.none, "float16": Compression.fp16, "bfloat16": Compression.bf16}


def reduce(
    gradients: Sequence[Any], variables: Sequence[Any], settings: GradientSettings, name: str
) -> list[Any]:
    """Return the gradients of all ranks (collective)."""
    same = tensorflow_gradients.GradientSettings(
        settings.op,
        settings.process_set,
        _COMPRESSIONS[settings.compression.dtype],
        settings.sparse_as_dense,
        settings.predivide,
        settings.groups,
    )
    local = tensorflow_gradients.LocalVariables(scale=False)  # there are none
    return tensorflow_gradients.reduce_gradients(gradients, variables, same, local, name)
