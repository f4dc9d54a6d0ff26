"""Keras with Horovod's callbacks: scaled learning rate, warm-up, checkpoints on one rank."""

from __future__ import annotations

import argparse
from pathlib import Path

import keras

import hvdtrain.keras as hvd
from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
arguments = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())

data = load_digits()
count = len(data.train) // hvd.size()  # the same number of batches on every rank
mine = slice(hvd.rank() * count, (hvd.rank() + 1) * count)

model = keras.Sequential(
    [
        keras.Input([1, 8, 8]),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
# N ranks make the global batch N times larger; scale the learning rate to match.
learning_rate = 0.05 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate, momentum=0.9))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

arguments.checkpoints.mkdir(exist_ok=True)
checkpoint = keras.callbacks.ModelCheckpoint(arguments.checkpoints / "digits-{epoch}.keras")
history = model.fit(
    data.train.inputs[mine],
    data.train.labels[mine],
    batch_size=16,
    epochs=arguments.epochs,
    verbose=0,
    validation_data=(data.test.inputs, data.test.labels),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(learning_rate, arguments.warmup_epochs),
        hvd.callbacks.RankZero(checkpoint),
    ],
)
accuracy = history.history["val_accuracy"][-1]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.2%} on {hvd.size()} ranks, files in {arguments.checkpoints}/")
