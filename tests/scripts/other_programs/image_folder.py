"""EfficientNet on a folder of images: on ranks, or in one process with MirroredStrategy."""

import contextlib
import sys

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd

folder, out, *mirrored = sys.argv[1:]
scope: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
if mirrored:
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
hvd.init()
keras.utils.set_random_seed(0)
images = keras.utils.image_dataset_from_directory(
    folder, image_size=(32, 32), batch_size=None, shuffle=False, verbose=False
)
images = images.shard(hvd.size(), hvd.rank()).batch(4 // hvd.size())
with scope:
    shape = (32, 32, 3)
    network = keras.applications.EfficientNetB0(False, None, input_shape=shape, pooling="avg")
    for layer in network.layers:  # what depends on how many ranks divide a batch
        layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    model = keras.Sequential([network, keras.layers.Dense(3)])
    plain = keras.optimizers.SGD(0.05)
    optimizer = plain if mirrored else hvd.DistributedOptimizer(plain)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
before = model.get_weights()
callbacks = [] if mirrored else [hvd.callbacks.MetricAverageCallback()]
losses = model.fit(images, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
found = [np.concatenate([each.ravel() for each in all]) for all in (before, model.get_weights())]
np.savez(f"{out}-{hvd.rank()}.npz", *found, losses=losses)
