"""A script in the shape of Horovod's elastic example for Keras, of which a rank is killed."""

import argparse
import os
import signal
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from newcomers import JOINED, await_newcomer
from ranks import report

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--victim", type=int, required=True)
parser.add_argument("--wanted", type=int, default=0)
args = parser.parse_args()

hvd.init()
started = hvd.size()
for gpu in tf.config.experimental.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)

RATE = 0.002
random = np.random.default_rng(hvd.rank())
images = random.random([48, 8, 8], dtype="float32")
labels = images[:, 0].argmax(axis=1) % 4
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis], tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(48).batch(8)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(4, activation="softmax"),
    ]
)
optimizer = hvd.DistributedOptimizer(
    tf.optimizers.Adam(RATE * hvd.size()),
    backward_passes_per_step=1,
    average_aggregated_gradients=True,
)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"]
)

# Makes the variables of the model and the optimizer, which the state consists of.
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset() -> None:
    """Have the learning rate follow the number of ranks, and take the step that new ranks take."""
    state.model.optimizer.learning_rate.assign(RATE * hvd.size())
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)


class Changes(tf.keras.callbacks.Callback):
    """Has the victim be killed in the second epoch, and waits for others in the third."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        here = hvd.size() == started and hvd.rank() == args.victim
        if here and (state.epoch, state.batch) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        if (state.epoch, state.batch) == (2, 1):
            await_newcomer(args.wanted)


state.register_reset_callbacks([on_state_reset])
callbacks = [
    Changes(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))


@hvd.elastic.run
def train(state: Any) -> None:
    state.model.fit(
        dataset,
        steps_per_epoch=12 // hvd.size(),
        epochs=args.epochs - state.epoch,
        callbacks=callbacks,
        verbose=0,
    )


train(state)
weights = np.concatenate([np.ravel(each) for each in model.get_weights()])
assert (hvd.allgather(weights[np.newaxis], name="weights") == weights).all()
if not JOINED:
    rate = float(model.optimizer.learning_rate) / RATE
    report(1, {"ranks": hvd.size(), "epoch": state.epoch, "rate": rate})
