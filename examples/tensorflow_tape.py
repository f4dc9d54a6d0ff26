"""TensorFlow 2: a custom training loop in tf.function, with a distributed gradient tape."""

from __future__ import annotations

import argparse

import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()

hvd.init()
tf.random.set_seed(hvd.rank())
gpus = tf.config.list_physical_devices("GPU")
if gpus:  # each rank uses its own
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

data = load_digits()
# Shards may differ by one sample: repeat them, and stop all ranks after the same number of steps.
samples = tf.data.Dataset.from_tensor_slices((data.train.inputs, data.train.labels))
samples = samples.shard(hvd.size(), hvd.rank()).repeat().shuffle(512).batch(16)
steps = arguments.epochs * len(data.train) // (16 * hvd.size())

model = tf.keras.Sequential(
    [
        tf.keras.Input([1, 8, 8]),
        tf.keras.layers.Reshape([8, 8, 1]),
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10),
    ]
)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam(0.002 * hvd.size())
optimizer.build(model.trainable_variables)
hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)


@tf.function
def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Train on one of this rank's batches."""
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for images, labels in samples.take(steps):
    loss = step(images, labels)

hits = tf.argmax(model(data.test.inputs), 1) == data.test.labels
accuracy = float(tf.reduce_mean(tf.cast(hits, tf.float32)))
if hvd.rank() == 0:
    print(f"loss {float(loss):.4f}, test accuracy {accuracy:.2%} on {hvd.size()} ranks")
