"""TensorFlow 1: a graph, a distributed optimizer, and a session with hooks."""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow.compat.v1 as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400, help="over all ranks")
parser.add_argument("--checkpoints", default="checkpoints-session")
arguments = parser.parse_args()

tf.disable_eager_execution()
hvd.init()
tf.set_random_seed(hvd.rank())
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())

data = load_digits()
images = tf.placeholder(tf.float32, [None, 1, 8, 8])
labels = tf.placeholder(tf.int64, [None])


def dense(inputs: tf.Tensor, width: int, name: str) -> tf.Tensor:
    """Return a dense layer with its own weights."""
    spread = tf.glorot_uniform_initializer()
    kernel = tf.get_variable(f"{name}/kernel", [inputs.shape[1], width], initializer=spread)
    bias = tf.get_variable(f"{name}/bias", [width], initializer=tf.zeros_initializer())
    return inputs @ kernel + bias


scores = dense(tf.nn.relu(dense(tf.reshape(images, [-1, 64]), 128, "hidden")), 10, "scores")
loss = tf.losses.sparse_softmax_cross_entropy(labels, scores)
hits = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores, 1), labels), tf.float32))

global_step = tf.train.get_or_create_global_step()
optimizer = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.002 * hvd.size()))
train = optimizer.minimize(loss, global_step=global_step)

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.train.StopAtStepHook(num_steps=arguments.steps // hvd.size()),
]
random = np.random.default_rng(hvd.rank())
accuracy = 0.0
with tf.train.MonitoredTrainingSession(
    # Only one rank reads and writes checkpoints; the hook broadcasts what it restores.
    checkpoint_dir=arguments.checkpoints if hvd.rank() == 0 else None,
    hooks=hooks,
    config=config,
) as session:
    while not session.should_stop():
        batch = random.integers(len(data.train), size=32)
        fed = {images: data.train.inputs[batch], labels: data.train.labels[batch]}
        _, accuracy = session.run([train, hits], fed)
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.2%} on the last batch, on {hvd.size()} ranks")
