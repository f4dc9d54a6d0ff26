"""Batch normalization over the batches of all ranks, exact for unequal batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.core.gradient_settings import sample_weight_of
from hvdtrain.core.process_set import global_process_set, stays_alone
from hvdtrain.tensorflow.graph import do_not_convert
from hvdtrain.tensorflow.operations import allreduce
from hvdtrain.tensorflow.optimizer import is_tf_keras
from hvdtrain.types import ReduceOp

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Normalize by mean and variance over all ranks (collective in training).

    Batches may differ between ranks. With the mean loss of unequal batches, gradients are exact in
    `fit`, with the sample_weight of an optimizer of hvdtrain.keras that is set before gradients
    are computed, or if each rank's loss is weighted by its share of the samples.

    Args:
        fused: must be False; Horovod has the argument.
        kwargs: arguments of tf.keras.layers.BatchNormalization.

    Raises:
        ValueError: `fused` is not False.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization does not support fused=True")
        if is_tf_keras(self):  # else it would normalize in one operation of TensorFlow
            kwargs["fused"] = False
        super().__init__(**kwargs)
        self.supports_jit = False

    @do_not_convert
    @collective
    def _moments(self, inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance, [channels]: mean = sum x / n, var = sum (x - mean)^2 / n.

        Args:
            inputs: floating point [batch, ..., channels], channels where the layer's axis is.
            args: the mask, bool [batch, ...] or None, in Keras 3; the axes in tf_keras.
        """
        if stays_alone(global_process_set):
            moments: tuple[tf.Tensor, tf.Tensor] = super()._moments(inputs, *args, **kwargs)
            return moments
        if is_tf_keras(self):
            axes, mask, keep_dims = args[0], kwargs["mask"], kwargs["keep_dims"]
        else:
            axes, mask, keep_dims = self._reduction_axes, args[0], False
        add = _adder(partial(sample_weight_of, set(map(id, self.trainable_variables))))
        counted = tf.ones_like(inputs)
        if mask is not None:
            counted *= tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
        parts = [tf.reduce_sum(each, axes, keepdims=True) for each in (counted, inputs * counted)]
        counts, sums = tf.unstack(add(tf.stack(parts)))
        counts = tf.maximum(counts, 1)
        mean = sums / counts
        centered = (inputs - mean) * counted
        variance = add(tf.reduce_sum(tf.square(centered), axes, keepdims=True)) / counts
        if keep_dims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _adder(weigh: Callable[[], Any]) -> Any:
    """Return a sum over ranks whose gradients are weighted by what each rank's batch counts."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def add(own: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        return allreduce(own, op=ReduceOp.SUM), add_gradients

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def add_gradients(own: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        told = weigh()
        counts = tf.cast(1.0 if told is None else told, own.dtype)
        total = allreduce(own * counts, op=ReduceOp.SUM)
        return tf.math.divide_no_nan(total, counts), add

    return add
