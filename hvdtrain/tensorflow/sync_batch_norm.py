"""Batch normalisation over the batches of all ranks, exact for unequal batches."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdtrain.core.place import size
from hvdtrain.tensorflow.autograph import unconverted
from hvdtrain.tensorflow.ops import allreduce
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
        super().__init__(**kwargs)
        self.supports_jit = False

    @unconverted
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Return mean and variance, [channels]: mean = sum x / n, var = sum (x - mean)^2 / n."""
        if size() == 1:
            moments: tuple[Any, Any] = super()._moments(inputs, mask)
            return moments
        axes = self._reduction_axes
        counted = tf.ones_like(inputs)
        if mask is not None:
            counted *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        counts, sums = tf.unstack(
            _sum([tf.reduce_sum(counted, axes), tf.reduce_sum(inputs * counted, axes)])
        )
        counts = tf.maximum(counts, 1)
        mean = sums / counts
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1
        centred = (inputs - tf.reshape(mean, shape)) * counted
        (squares,) = tf.unstack(_sum([tf.reduce_sum(tf.square(centred), axes)]))
        return mean, squares / counts


def _sum(parts: list[Any]) -> Any:
    return allreduce(tf.stack(parts), op=ReduceOp.SUM)
