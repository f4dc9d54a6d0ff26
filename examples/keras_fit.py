"""Keras `fit` on all ranks, in place of a tf.distribute strategy and its scope."""

from __future__ import annotations

import argparse

import keras

import hvdtrain.keras as hvd
from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="over all ranks")
parser.add_argument("--learning-rate", type=float, default=0.004)
arguments = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())

data = load_digits()
count = len(data.train) // hvd.size()  # the same number of batches on every rank
mine = slice(hvd.rank() * count, (hvd.rank() + 1) * count)

images = keras.Input([1, 8, 8])
hidden = keras.layers.Reshape([8, 8, 1])(images)
hidden = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(hidden)
hidden = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(hidden)
hidden = keras.layers.Flatten()(keras.layers.MaxPooling2D()(hidden))
scores = keras.layers.Dense(10)(keras.layers.Dropout(0.1)(hidden))
model = keras.Model(images, scores)

model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(arguments.learning_rate)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(
    data.train.inputs[mine],
    data.train.labels[mine],
    batch_size=arguments.batch_size // hvd.size(),
    epochs=arguments.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
    validation_data=(data.test.inputs, data.test.labels),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
)
accuracy = history.history["val_accuracy"][-1]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.2%} on {hvd.size()} ranks")
