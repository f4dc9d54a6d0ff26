"""Variables that become what comes as their gradient: scales and histories of float8 in Keras."""

from typing import Any

import keras
import numpy as np
from keras_optimizer_cases import Array, assert_close, digest, stateless
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.errors import MismatchError, UnsupportedError

ON_JAX = keras.backend.backend() == "jax"
ROWS, SIZE = 4, 4  # of each rank in a step, and of a row


def given(step: int, rank: int) -> Array:
    """Return what overwrites a variable, of which each half is largest on another rank."""
    ranks = np.array([rank, hvd.size() - rank], np.float32)
    return 1 + np.float32(1e-3) * (ranks + 10 * step)


def the_largest_of_all_ranks_overwrites() -> str:
    scaling = keras.optimizers.LossScaleOptimizer
    ways: list[tuple[Any, dict[str, Any], bool]] = [
        (keras.optimizers.SGD(0.5), {}, False),
        (keras.optimizers.SGD(0.5), {"backward_passes_per_step": 2}, False),
        (keras.optimizers.SGD(0.5), {"exchange": "half:type=bf16"}, False),
        (keras.optimizers.SGD(0.5), {"exchange": "local:steps=2"}, False),
        (keras.optimizers.SGD(0.5), {"exchange": "blockmomentum:steps=2,momentum=0.5"}, False),
        (keras.optimizers.SGD(0.5), {"exchange": "postlocal:after=2,steps=1"}, True),
        (scaling(keras.optimizers.SGD(0.5)), {"exchange": "topk:ratio=1.0"}, False),
        (keras.optimizers.SGD(0.5), {}, True),
    ]
    rank, ends = hvd.rank(), []
    for plain, options, local in ways:
        kernel, scale = (keras.Variable(np.zeros(2, np.float32)) for _ in "ks")
        scale.overwrite_with_gradient = True
        optimizer = hvd.DistributedOptimizer(plain, **options)
        optimizer.build([kernel, scale])
        if local:
            optimizer.register_local_var(scale)
        apply = stateless(optimizer) if ON_JAX else optimizer.apply
        unit = float(getattr(optimizer, "dynamic_scale", 1.0))
        for step in range(2):
            gradient = np.full(2, unit * (rank + 1), np.float32)
            pair = [keras.ops.convert_to_tensor(g) for g in (gradient, given(step, rank))]
            apply(pair, [kernel, scale])
        largest = given(1, rank)
        if not local:
            largest = np.max([given(1, each) for each in range(hvd.size())], axis=0)
            ends.append(scale)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(scale), largest)
        if "blockmomentum" not in str(options):
            assert_close([kernel], [np.full(2, -(hvd.size() + 1) / 2)])
        ends.append(kernel)
    return digest(ends)


def trained(optimizer: Any, rows: Any) -> Any:
    """Return a model of layers that compute in float8, after four steps on these rows."""
    keras.utils.set_random_seed(3)
    # Keras rounds gradients of biases to bfloat16.
    layers = [keras.layers.Dense(units, use_bias=False) for units in (3, 2)]
    model = keras.Sequential([keras.Input([SIZE]), *layers])
    for layer in layers:
        layer.quantize("float8")
    # Gradients of a sum are as large on the rows of one rank as among those of all.
    model.compile(optimizer, keras.losses.MeanSquaredError(reduction="sum"))
    random = np.random.default_rng(4)
    for step in range(4):
        x = random.normal(size=(hvd.size() * ROWS, SIZE)).astype(np.float32)
        x *= 1 + np.arange(len(x), dtype=np.float32)[:, None] % (3 + step)
        y = random.normal(size=(len(x), 2)).astype(np.float32)
        model.train_on_batch(x[rows], y[rows])
    return model


def float8_trains_as_on_one_rank() -> str:
    sgd, rank = keras.optimizers.SGD, hvd.rank()
    rows = slice(rank * ROWS, rank * ROWS + ROWS)
    model = trained(hvd.DistributedOptimizer(sgd(1e-3), op=hvd.Sum), rows)
    want = trained(sgd(1e-3), slice(None))
    assert_close(model.trainable_variables, want.trainable_variables)
    return digest(model.trainable_variables)


def what_cannot_overwrite_is_refused() -> None:
    if ON_JAX or hvd.size() == 1:
        return
    scale = keras.Variable(1.0, name="scale")
    scale.overwrite_with_gradient = hvd.rank() == 0  # not on all ranks
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    optimizer.build([scale])
    with raising(MismatchError):
        optimizer.apply([keras.ops.ones(())], [scale])
    scale.overwrite_with_gradient = True
    with raising(UnsupportedError, text="'scale' is a scale or history of float8"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), sharded=True).build([scale])
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        import hvdtrain.tensorflow as hvd_tf

        with tf.GradientTape() as tape:
            loss = scale * 2.0
        with raising(UnsupportedError, text="float8"):
            hvd_tf.DistributedGradientTape(tape, op=hvd_tf.Adasum).gradient(loss, [scale])
