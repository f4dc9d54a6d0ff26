"""What the main job adds to Keras: optimizers by name, metrics of all ranks, samplers, recipes."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from data_files import write_mnist
from data_page import check_keras_loop
from keras_optimizer_cases import digest
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.errors import UsageError
from hvdtrain.train.keras import fit
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe


def optimizers_by_their_names() -> None:
    nothing = Recipe(None, None, print)

    def made(name: str, **options: Any) -> Any:
        chosen = TrainOptions(framework="keras", optimizer=name, **options)
        return fit.plain_optimizer(nothing, chosen, 0.25)

    for name, kind in {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lamb": "Lamb"}.items():
        one = made(name, clip_norm=2.0)
        assert (type(one).__name__, one.name, one.global_clipnorm) == (kind, "optimizer", 2.0)
        assert one.weight_decay == (0.01 if name == "adamw" else None)
        assert made(name, weight_decay=0.5).weight_decay == 0.5
        assert float(one.learning_rate) == 0.25
    assert made("adamw", weight_decay=0.0).weight_decay == 0.0
    kernel, bias = (keras.Variable(np.ones(2, "float32"), name=name) for name in ("kernel", "bias"))
    lamb = made("lamb", weight_decay=0.5)
    lamb.build([kernel, bias])
    assert (lamb._use_weight_decay(kernel), lamb._use_weight_decay(bias)) == (True, False)


METRICS: dict[str, Callable[[], Any]] = {
    "error": lambda: keras.metrics.MeanAbsoluteError(),
    "rmse": lambda: keras.metrics.RootMeanSquaredError(),
    "accuracy": lambda: keras.metrics.BinaryAccuracy(),
    "auc": lambda: keras.metrics.AUC(num_thresholds=20),
    "recall": lambda: keras.metrics.Recall(),
    "iou": lambda: keras.metrics.BinaryIoU(target_class_ids=[0, 1], dtype="float32"),
    "f1": lambda: keras.metrics.F1Score(threshold=0.5),
}


class Largest(keras.metrics.Metric):
    """Does not add up."""


class Counted(keras.metrics.Metric):
    adds_up = True


def metrics_count_every_sample_of_all_ranks_once() -> None:
    random = np.random.default_rng(4)
    targets = random.integers(0, 2, (17, 1)).astype(np.float32)
    scores = (0.6 * targets + 0.4 * random.random((17, 1))).astype(np.float32)
    edges = [0, *sorted(random.choice(np.arange(1, 17), hvd.size() - 1, replace=False)), 17]
    mine = np.arange(17)[edges[hvd.rank()] : edges[hvd.rank() + 1]]
    # jax compiles each operation on each shape, which takes half a minute for all of them.
    names = ["error", "rmse"] if keras.backend.backend() == "jax" else list(METRICS)
    metrics, whole = ({name: METRICS[name]() for name in names} for _ in range(2))
    for metric in whole.values():
        metric.update_state(targets, scores)
    tally = fit.KerasMetricSums(fit.sum_over_samples(keras.losses.MeanSquaredError()), metrics)
    rows, weights = [*mine, 0], np.array([0.25] * len(mine) + [0.0], np.float32)
    tally.update_state(targets[rows], scores[rows], sample_weight=weights)  # the last one fills up
    totals = tally.reduce()
    values = totals.values({name: fit.KerasMetricValue(metric) for name, metric in metrics.items()})
    assert totals.samples == 17
    np.testing.assert_allclose(values.pop("loss"), np.square(targets - scores).mean(), rtol=1e-6)
    for name, value in values.items():
        expected = keras.ops.convert_to_numpy(whole[name].result())
        np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=name)
        assert type(value) in (float, list)
    fit.require_adding_metrics({"own": Counted()})
    with raising(UsageError, text="metric 'top' is a Largest, whose variables are not known to"):
        fit.require_adding_metrics({"top": Largest()})


def the_loop_of_the_data_page() -> str:
    return digest(check_keras_loop("import hvdtrain.keras"))


def recipes_build_their_models_and_losses() -> None:
    if keras.backend.backend() != "torch":  # which the module of recipes imports in any case
        return
    from hvdtrain.train.recipes import keras_recipes

    with tempfile.TemporaryDirectory() as folder:
        write_mnist(Path(folder), train=3, test=2)
        recipes = [keras_recipes.digits(0.1), keras_recipes.mnist(Path(folder), 0.1, width=2)]
        plain = keras_recipes.mnist(Path(folder), width=2)
    for recipe in recipes:
        scores = keras.ops.convert_to_numpy(recipe.model(recipe.train.inputs[:3]))
        assert scores.shape == (3, 10)
        labels = recipe.train.labels[:3]
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        losses = -logs[np.arange(3), labels]
        smoothed = 0.9 * losses - 0.1 * logs.mean(axis=1)
        for loss, expected in ((plain.loss, losses), (recipe.loss, smoothed)):
            got = keras.ops.convert_to_numpy(loss(labels, scores))
            np.testing.assert_allclose(got, expected.sum(), rtol=1e-5)
