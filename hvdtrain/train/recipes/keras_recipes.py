"""The built-in recipes of Keras: the networks of torch_recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from hvdtrain.data.digits import load_digits
from hvdtrain.data.idx import load_mnist, read_mnist_images
from hvdtrain.errors import UsageError
from hvdtrain.train.recipe import Recipe


def _cross_entropy(label_smoothing: float) -> Any:
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
        ops = keras.ops
        labels = ops.reshape(ops.cast(y_true, "int32"), [-1])
        targets = ops.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(
            targets, y_pred, from_logits=True, label_smoothing=self._label_smoothing
        )


def _classifier(
    name: str, layers: list[Any], data: Any, label_smoothing: float, **others: Any
) -> Recipe:
    return Recipe(
        keras.Sequential(layers, name=name),
        data.train,
        _cross_entropy(label_smoothing),
        data.test,
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy(name="accuracy")},
        classes=[str(digit) for digit in range(10)],
        **others,
    )


def digits(label_smoothing: float = 0.0) -> Recipe:
    """Return the network for images [n, 1, 8, 8], and the data that comes with scikit-learn."""
    kinds = keras.layers
    layers = [
        keras.Input([1, 8, 8]),
        kinds.Reshape([8, 8, 1], name="channels_last"),
        kinds.Conv2D(16, 3, padding="same", activation="relu", name="conv_1"),
        kinds.Conv2D(32, 3, padding="same", activation="relu", name="conv_2"),
        kinds.MaxPooling2D(2, name="pool"),
        kinds.Flatten(name="flat"),
        kinds.Dense(64, activation="relu", name="dense"),
        kinds.Dense(10, name="scores"),
    ]
    return _classifier("digits", layers, load_digits(), label_smoothing, most_threads=1)


def mnist(data_dir: Path | None = None, label_smoothing: float = 0.0, width: int = 32) -> Recipe:
    """Return the network for images [n, 1, 28, 28]."""
    data, kinds = load_mnist(data_dir), keras.layers
    layers = [
        keras.Input([1, 28, 28]),
        kinds.Reshape([28, 28, 1], name="channels_last"),
        kinds.Conv2D(width, 3, activation="relu", name="conv_1"),
        kinds.Conv2D(2 * width, 3, activation="relu", name="conv_2"),
        kinds.MaxPooling2D(2, name="pool"),
        kinds.Dropout(0.25, name="dropout_1"),
        kinds.Flatten(name="flat"),
        kinds.Dense(128, activation="relu", name="dense"),
        kinds.Dropout(0.5, name="dropout_2"),
        kinds.Dense(10, name="scores"),
    ]
    return _classifier("mnist", layers, data, label_smoothing, read=read_mnist_images)
