"""The loss of classification recipes, for Keras."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.errors import UsageError


def cross_entropy(label_smoothing: float) -> Any:
    """Return the cross entropy of labels [n] and scores [n, classes], summed over samples."""
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    if label_smoothing:
        return _Smoothed(label_smoothing)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


class _Smoothed(keras.losses.Loss):  # type: ignore[misc]
    """Cross entropy with label smoothing, which Keras lacks for integer labels."""

    def __init__(self, label_smoothing: float) -> None:
        super().__init__(name="cross_entropy", reduction="sum")
        self._label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return one loss for each sample."""
        ops = keras.ops
        labels = ops.reshape(ops.cast(y_true, "int32"), [-1])
        targets = ops.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(
            targets, y_pred, from_logits=True, label_smoothing=self._label_smoothing
        )
