"""Samples that hvdtrain.keras counts, in loops of one's own and in fit."""

import contextlib
import importlib
import io
from functools import partial
from typing import Any

import keras
import numpy as np
from keras_fit_cases import Batches
from keras_formula import Simulated
from keras_optimizer_cases import SHAPES, assert_close, digest, own, stepped
from keras_weight_cases import fit_line, line_batches, line_model
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.keras import fitting


def uneven_batches_are_normalized_as_one() -> str | None:
    """By fit, in a step that is traced, and in an eager loop that says what a batch weighs."""
    if keras.backend.backend() != "tensorflow":
        return None
    tf = importlib.import_module("tensorflow")
    own_layer = importlib.import_module("hvdtrain.tensorflow").SyncBatchNormalization
    size, rank, random = hvd.size(), hvd.rank(), np.random.default_rng(4)
    ends = [sum(range(2, r + 2)) for r in range(size + 1)]  # rank r has r + 2 rows
    x, y = (random.normal(size=(ends[-1], n)).astype("f4") + 1 for n in (3, 1))
    mine = slice(ends[rank], ends[rank + 1])

    def train(together: bool, by_fit: bool) -> list[Any]:
        keras.utils.set_random_seed(1)
        layer = own_layer if together else keras.layers.BatchNormalization
        # Without variables no optimizer is known to be its own.
        normalization = layer(center=by_fit, scale=by_fit)
        layers = [keras.layers.Dense(4), normalization, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input([3]), *layers])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer = hvd.DistributedOptimizer(optimizer) if together else optimizer
        rows = mine if together else slice(None)
        if by_fit:
            model.compile(optimizer, loss="mse")
            model.fit(Batches([(x[rows], y[rows])] * 2), verbose=0)
            return list(model.weights)
        for _ in range(2):
            if together:
                optimizer.sample_weight = len(x[rows])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x[rows], training=True) - y[rows]))
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
        return list(model.weights)

    # Of other models, which say nothing of this one; they have no variables yet.
    others = [hvd.DistributedOptimizer(keras.optimizers.SGD()) for _ in "ab"]
    others[0].sample_weight = len
    found = [train(True, by_fit=False)]
    others[1].sample_weight = 5
    found.insert(0, train(True, by_fit=True))
    for weights, by_fit in zip(found, (True, False), strict=True):
        assert_close(weights, train(False, by_fit), rtol=1e-4)
    with raising(ValueError):
        own_layer(fused=True)
    return digest([*found[0], *found[1]])


def a_weight_that_a_traced_function_would_keep_is_refused() -> None:
    backend, optimizer = keras.backend.backend(), hvd.DistributedOptimizer(keras.optimizers.SGD())
    if backend == "torch":  # which traces nothing
        return
    variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    optimizer.build(variables)
    optimizer.sample_weight = 2.5
    with raising(ValueError, text="sample_weight was set to 2.5 outside of a function"):
        if backend == "tensorflow":
            importlib.import_module("tensorflow").function(optimizer.apply)(own(0), variables)
        else:
            state, values = ([v.value for v in each] for each in (optimizer.variables, variables))
            importlib.import_module("jax").jit(optimizer.stateless_apply)(state, own(0), values)


def slices_count_by_samples() -> str | None:
    """Gradients of embeddings on TensorFlow, in eager mode and in a graph.

    Rank 0 sets no weight, and counts 1. Infinity reaches all ranks, also with the weight 0.
    """
    if keras.backend.backend() != "tensorflow":
        return None
    tf = importlib.import_module("tensorflow")
    counts, ends = range(1, hvd.size() + 1), []
    mean = -sum(count * count for count in counts) / sum(counts)

    def step(optimizer: Any, variables: Any, samples: Any, values: Any) -> None:
        if hvd.rank() > 0:
            optimizer.sample_weight = samples
        slices = tf.IndexedSlices(values[tf.newaxis], tf.constant([1]), tf.constant([4, 2]))
        optimizer.apply([slices, values], variables)

    for convert in (lambda function: function, tf.function):
        variables = [keras.Variable(np.zeros(shape, "f4")) for shape in ([4, 2], [2])]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables)
        own, take = tf.constant(hvd.rank() + 1.0), convert(partial(step, optimizer, variables))
        take(own, tf.fill([2], own))
        assert_close(variables, [np.outer([0, 1, 0, 0], [mean, mean]), np.full(2, mean)])
        ends += [variable.numpy() for variable in variables]
        take(tf.constant(0.0), tf.fill([2], np.inf if hvd.rank() > 0 else own))
        table, dense = (np.isnan(variable.numpy()) for variable in variables)
        assert table[1].all()
        assert dense.all()
    return digest(ends)


def fit_counts_samples() -> str:
    """The last batch is smaller, so that a block has two steps at first, and then three."""
    batches, ends = line_batches([4] * hvd.size()), []
    block, warm_up = 8 * hvd.size(), 10 * hvd.size()
    rate = f"momentum=0,rate={1 / hvd.size()!r}"
    for text, simulated in (
        (f"blockmomentum:block={block},{rate}", Simulated(batches, 0, block=block)),
        (f"local:steps=2,distributed_after={warm_up}", Simulated(batches, 3, 2)),
    ):
        model = line_model(text)
        for _ in range(2):
            simulated.epoch()
        fit_line(model, batches, epochs=2)
        kernel, bias = simulated.weights[0]
        assert_close(model.weights, [kernel.reshape(3, 1), bias], rtol=1e-5)
        ends += model.weights
    return digest(ends)


class GraphMeans(keras.layers.Layer):
    def call(self, nodes: Any, graphs: Any) -> Any:
        sums, counts = (
            keras.ops.segment_sum(each, graphs, num_segments=2)
            for each in (nodes, keras.ops.ones_like(nodes))
        )
        return sums / counts


class OwnStep(keras.Model):
    def train_step(self, *given: Any) -> Any:
        self.optimizer.sample_weight = keras.ops.shape(given[-1][1])[0] ** 2
        return super().train_step(*given)


def line(kind: Any = keras.Model, masking: bool = False, heads: int = 1) -> Any:
    """Return a model of x times the kernel for each step of a row; a second head averages them."""
    x = keras.Input([None, 1])
    hidden = keras.layers.Masking()(x) if masking else x
    outputs = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(hidden)]
    if heads == 2:
        outputs.append(keras.layers.GlobalAveragePooling1D()(outputs[0]))
    return kind(x, outputs if heads == 2 else outputs[0])


def graphs() -> Any:
    nodes, ids = keras.Input([1]), keras.Input([], dtype="int32")
    hidden = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(nodes)
    return keras.Model([nodes, ids], GraphMeans()(hidden, ids))


def filled(rows: int, steps: int, target: float, *weights: Any) -> tuple[Any, ...]:
    shape = (rows, steps, 1)
    return np.ones(shape, "f4"), np.full(shape, target, "f4"), *weights


def masked(length: int, target: float) -> tuple[Any, ...]:
    x, y = filled(1, 4, target)
    x[:, length:] = 0
    return x, y


def two_graphs(nodes: int, target: float) -> tuple[Any, ...]:
    inputs = (np.ones((2 * nodes, 1), "f4"), np.repeat([0, 1], nodes).astype("i4"))
    return inputs, np.full((2, 1), target, "f4")


def mean_square(y: Any, output: Any) -> Any:
    return keras.ops.mean((y - output) ** 2)


def rows_squared(x: Any, y: Any, weights: Any) -> Any:
    return keras.ops.shape(y)[0] ** 2


def stepped_once(
    model: Any, batch: Any, loss: Any, told: Any = None, by_fit: bool = True
) -> tuple[float, str]:
    """Return five times the kernel after a step, and what this rank said about weights."""
    optimizer, said = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), io.StringIO()
    optimizer.sample_weight = told
    # TensorFlow takes a second for each graph.
    eagerly = keras.backend.backend() == "tensorflow" and callable(loss)
    model.compile(optimizer, loss=loss, run_eagerly=eagerly)
    fitting.warn_once.cache_clear()
    with contextlib.redirect_stderr(said):
        if by_fit:
            model.fit(Batches([batch] if isinstance(batch, tuple) else batch), verbose=0)
        else:
            model.train_on_batch(*batch)
    (kernel,) = keras.ops.convert_to_numpy(model.weights[0]).flat
    return 5 * float(kernel), said.getvalue()


def batches_weigh_what_their_loss_divides_by() -> str:
    """From a kernel of 0, and with inputs 1, a step with rate 0.1 is a fifth of the mean target."""
    size, first, ends = hvd.size(), hvd.rank() == 0, []
    squares, target = keras.losses.MeanSquaredError, 4.0 if first else 1.0

    def averaged(first: float, others: float, target: float = 4.0, other: float = 1.0) -> float:
        rest = others * (size - 1)
        return (first * target + rest * other) / (first + rest)

    uneven = filled(1 if first else 3, 1, target)
    weighted = filled(2, 1, target, np.array([1 if first else 3, 0], "f4"))
    by_weights = squares(reduction="mean_with_sample_weight")
    for model, batch, loss, how, want in (
        (line(), uneven, "mse", {"by_fit": False}, averaged(1, 3)),
        (graphs(), two_graphs(1 if first else 9, 1.0 if first else 3.0), "mse", {}, (3 - 2 / size)),
        (line(), uneven, squares(reduction="sum"), {}, (4 + 3 * (size - 1)) / size),
        (line(masking=True), masked(1 if first else 3, target), "mse", {}, averaged(1, 3)),
        (line(), weighted, by_weights, {}, averaged(1, 3)),
        (line(), weighted, squares(), {}, averaged(1, 1, 4 / 2, 3 / 2)),
        (line(), uneven, mean_square, {"told": rows_squared}, averaged(1, 9)),
        (line(OwnStep), uneven, "mse", {}, averaged(1, 9)),
    ):
        kernel, said = stepped_once(model, batch, loss, **how)
        assert abs(kernel - want) < 1e-5, (kernel, want)
        assert said == ""
        ends.append(kernel)
    return digest(ends)


def weights_that_nobody_knows_are_warned_of() -> str:
    """Rows are taken of a loss that is a mean already, and the first of two that disagree."""
    first = hvd.rank() == 0
    batch, says = filled(1 if first else 3, 1, 4.0 if first else 1.0), hvd.size() > 1
    kernel, said = stepped_once(line(), batch, mean_square)
    assert abs(kernel - (4 + 3 * (hvd.size() - 1)) / (1 + 3 * (hvd.size() - 1))) < 1e-5
    assert ("is not averaged by one of Keras's losses" in said) == (says and first), said
    assert said.count("set optimizer.sample_weight to a function") == (says and first)
    batches = []
    for steps in (2, 5):
        x, y = filled(2, steps, 1.0)
        batches.append((x, (y, y[:, 0])))
    also, said = stepped_once(line(heads=2), batches, ["mse", "mse"])
    assert said.count("divide by numbers whose ratio may differ between batches") == says
    with raising(ValueError, text="optimizer.sample_weight is 8, but fit and train_on_batch"):
        stepped_once(line(), batch, "mse", told=8)
    if says:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.sample_weight = rows_squared
        with raising(ValueError, text="optimizer.sample_weight is a function, which only fit"):
            stepped(optimizer, own, 1)
    return digest([kernel, also])
