"""hvdtrain.tensorflow with Keras 2, which TF_USE_LEGACY_KERAS=1 makes tf.keras."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_allocator_cases as allocator_cases
from all_cases import cases_of
from raising import raising
from ranks import report

import hvdtrain.tensorflow as hvd
from hvdtrain.tensorflow import elastic
from hvdtrain.world import promised_world

keras = tf.keras
RATE = 0.25


def sum_of_gradients() -> float:
    """Return how much the gradients of all ranks are, on the average."""
    return (hvd.size() + 1) / 2


def optimizers() -> list[Any]:
    return [keras.optimizers.SGD(RATE), keras.optimizers.legacy.SGD(RATE)]


def all_copy_what_one_rank_has_to_copy() -> None:
    variables = [tf.Variable(tf.zeros(shape)) for shape in allocator_cases.SHAPES]
    with allocator_cases.noting() as noted:
        for number in range(3):
            results = allocator_cases.reduced(
                variables, allocator_cases.factors(hvd.rank(), number)
            )
            allocator_cases.check(results, allocator_cases.average(number))
    assert not noted


def every_way_to_step_reduces() -> None:
    scale = hvd.rank() + 1.0

    def minimize(optimizer: Any, weight: tf.Variable) -> None:
        optimizer.minimize(lambda: tf.reduce_sum(weight) * scale, [weight])

    def apply(optimizer: Any, weight: tf.Variable) -> None:
        optimizer.apply_gradients(zip([tf.fill([3], scale)], [weight], strict=True))

    def traced(optimizer: Any, weight: tf.Variable) -> None:
        tf.function(lambda: apply(optimizer, weight), autograph=False)()

    for passes in (1, 2):
        for step in (minimize, apply, traced):
            for inner in optimizers():
                optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=passes)
                weight = tf.Variable(tf.zeros([3]))
                for _ in range(2 * passes):
                    step(optimizer, weight)
                want = -RATE * 2 * passes * sum_of_gradients()
                np.testing.assert_allclose(weight, [want] * 3, rtol=1e-6)
                assert int(optimizer.iterations) == 2 * passes


def fit_gives_what_one_rank_gives() -> None:
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(0)
    x = random.normal(size=(3, size, 4, 2)).astype(np.float32)  # steps, ranks, rows
    y = x.sum(-1, keepdims=True)

    def fit(optimizer: Any, inputs: Any, targets: Any, rows: int) -> list[Any]:
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
        model.set_weights([np.ones([2, 1]), np.zeros(1)])
        model.compile(optimizer, loss="mse")
        flat = inputs.reshape(-1, 2), targets.reshape(-1, 1)
        model.fit(*flat, batch_size=rows, shuffle=False, verbose=0)
        weights: list[Any] = model.get_weights()
        return weights

    for mine, alone in zip(optimizers(), optimizers(), strict=True):
        got = fit(hvd.DistributedOptimizer(mine), x[:, rank], y[:, rank], 4)
        for part, want in zip(got, fit(alone, x, y, 4 * size), strict=True):
            np.testing.assert_allclose(part, want, rtol=1e-5)


def loss_scales_look_at_reduced_gradients() -> None:
    """A gradient that is not finite on one rank is skipped on all."""
    scaling = keras.mixed_precision.LossScaleOptimizer
    for inner in optimizers():
        optimizer = scaling(hvd.DistributedOptimizer(inner))
        factor, weight = tf.Variable(1.0), tf.Variable([0.0])

        def loss(factor: tf.Variable = factor, weight: tf.Variable = weight) -> Any:
            return tf.reduce_sum(weight) * factor

        for value in (float("inf") if hvd.rank() == 0 else 1.0, 1.0):
            factor.assign(value)
            optimizer.minimize(loss, [weight])
        np.testing.assert_allclose(weight, [-RATE])
        with raising(ValueError, text="wrap the optimizer"):
            hvd.DistributedOptimizer(scaling(inner))
        with raising(ValueError, text="already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(inner))
    twice = hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2)
    with raising(ValueError, text="LossScaleOptimizer"):
        scaling(twice).minimize(loss, [weight])


def saved_models_load_without_hvdtrain() -> None:
    for number, inner in enumerate(optimizers()):
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
        model.compile(hvd.DistributedOptimizer(inner), loss="mse")
        path = Path(f"model-{hvd.rank()}-{number}.keras")
        model.save(path)
        loaded = keras.models.load_model(path).optimizer
        assert type(loaded).__name__ == "SGD"
        assert type(loaded).__module__.startswith("tf_keras.src.")


def functions_with_operations_are_saved() -> None:
    layers = [keras.layers.Dense(1, input_shape=(2,)), hvd.SyncBatchNormalization()]
    model = keras.Sequential(layers)
    model.save(f"model-{hvd.rank()}", save_format="tf")
    saved = tf.saved_model.load(f"model-{hvd.rank()}")
    given = tf.ones([3, 2])
    np.testing.assert_allclose(saved(given, training=False), model(given), rtol=1e-6)


def states_go_back() -> None:
    for inner in optimizers():
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
        model.compile(inner, loss="mse")
        state: Any = elastic.TensorFlowKerasState(model, epoch=hvd.rank())
        state.sync()
        began = [np.array(v) for v in state.variables]
        model.fit(np.ones([4, 2]), np.full([4, 1], 9.0 + hvd.rank()), verbose=0)
        assert int(inner.iterations) == 1
        state.restore()
        assert (int(inner.iterations), state.epoch) == (0, 0)
        for variable, value in zip(state.variables, began, strict=True):
            np.testing.assert_array_equal(variable, value)


def what_is_for_keras_3_refuses() -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import hvdtrain.keras

    with raising(ValueError, text="hvdtrain.tensorflow.DistributedOptimizer takes"):
        hvdtrain.keras.DistributedOptimizer(keras.optimizers.SGD())


def _main() -> None:
    world = promised_world(os.environ)
    if world is not None and world.rank == 1:
        tf.zeros([])  # before init(), so that this rank has no allocator
    hvd.init()
    cases = cases_of(sys.modules[__name__])
    for case in cases:
        case()
    report(cases=len(cases))


if __name__ == "__main__":
    _main()
