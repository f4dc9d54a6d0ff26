"""A script in the shape of Horovod's elastic example for tapes, of which a rank is killed."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from ranks import report

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--victim", type=int, required=True)
args = parser.parse_args()

hvd.init()
started = hvd.size()
for gpu in tf.config.experimental.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)

RATE = 0.002
random = np.random.default_rng(hvd.rank())
images = random.random([48, 8, 8], dtype="float32")
dataset = tf.data.Dataset.from_tensor_slices(
    (
        tf.cast(images[..., tf.newaxis], tf.float32),
        tf.cast(images[:, 0].argmax(axis=1) % 4, tf.int64),
    )
)
dataset = dataset.repeat().shuffle(48).batch(8)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(4, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(RATE * hvd.size())


@tf.function
def training_step(images: Any, labels: Any, allreduce: bool = True) -> Any:
    """Take a step, on the gradients of all ranks if asked to."""
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss_value


# Makes the variables of the model and the optimizer, which the state consists of.
for images, labels in dataset.take(1):
    training_step(images, labels, allreduce=False)


def perhaps_end(state: Any) -> None:
    """Be killed in the middle, if this rank is the victim."""
    if hvd.size() == started and hvd.rank() == args.victim and state.batch == 4:
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: Any) -> None:
    """Take the steps of a number of ranks, and commit after each one."""
    start_batch = state.batch
    batches = dataset.skip(state.batch).take(args.steps // hvd.size())
    for batch_idx, (images, labels) in enumerate(batches):
        state.batch = start_batch + batch_idx
        perhaps_end(state)
        training_step(images, labels)
        state.commit()


def on_state_reset() -> None:
    """Have the learning rate follow the number of ranks."""
    optimizer.learning_rate.assign(RATE * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
if hvd.rank() == 0:
    checkpoint.save("./checkpoints")
weights = np.concatenate([np.ravel(each) for each in model.get_weights()])
assert (hvd.allgather(weights[np.newaxis], name="weights").numpy() == weights).all()
rate = float(optimizer.learning_rate) / RATE
report(1, {"ranks": hvd.size(), "batch": state.batch, "rate": rate})
