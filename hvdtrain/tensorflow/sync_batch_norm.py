"""Batch normalisation over the batches of all ranks, exact for unequal batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.core.horovod_api import size
from hvdtrain.tensorflow.gradients.tf_keras_optimizer import is_tf_keras
from hvdtrain.tensorflow.graph.autograph import unconverted
from hvdtrain.tensorflow.operations.ops import allreduce
from hvdtrain.types import ReduceOp

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Normalise by mean and variance over all ranks (collective in training).

    Batches may differ between ranks. With the mean loss of unequal batches, gradients are exact
    if each rank's loss is weighted by its share of the samples.

    Args:
        fused: for Horovod's sake; only False goes.
        kwargs: those of tf.keras.layers.BatchNormalization.

    Raises:
        ValueError: `fused` is not False.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization does not go with fused=True")
        if is_tf_keras(self):  # which would else normalise in one operation of TensorFlow's
            kwargs["fused"] = False
        super().__init__(**kwargs)
        self.supports_jit = False

    @unconverted
    def _moments(self, inputs: Any, *given: Any, **named: Any) -> tuple[Any, Any]:
        """Return mean and variance, [channels]: mean = sum x / n, var = sum (x - mean)^2 / n.

        Keras 3 gives the mask; tf_keras the axes, and by name the mask and whether to keep them.
        """
        if size() == 1:
            moments: tuple[Any, Any] = super()._moments(inputs, *given, **named)
            return moments
        if is_tf_keras(self):
            axes, mask, keep = given[0], named["mask"], named["keep_dims"]
        else:
            axes, mask, keep = self._reduction_axes, given[0], False
        mean, variance = _moments_of_all_ranks(inputs, axes, mask)
        return (mean, variance) if keep else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _moments_of_all_ranks(inputs: Any, axes: Any, mask: Any) -> tuple[Any, Any]:
    """Return mean and variance with the reduced axes kept as ones."""
    counted = tf.ones_like(inputs)
    if mask is not None:
        counted *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
    parts = [tf.reduce_sum(each, axes, keepdims=True) for each in (counted, inputs * counted)]
    counts, sums = tf.unstack(_sum(parts))
    counts = tf.maximum(counts, 1)
    mean = sums / counts
    centred = (inputs - mean) * counted
    (squares,) = tf.unstack(_sum([tf.reduce_sum(tf.square(centred), axes, keepdims=True)]))
    return mean, squares / counts


def _sum(parts: list[Any]) -> Any:
    return allreduce(tf.stack(parts), op=ReduceOp.SUM)
