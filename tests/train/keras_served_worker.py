"""Trains Keras models with a parameter server on three ranks, and on rank 0 by plain Keras."""

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from point_recipes import CLASSES, points
from ranks import report
from stopping import stop_in_step

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.data import sampling
from hvdtrain.errors import UsageError
from hvdtrain.train.callbacks import Callback
from hvdtrain.train.checkpoints import checkpoint_files, load_checkpoint
from hvdtrain.train.keras.fit import sum_over_samples
from hvdtrain.train.keras.framework import KerasFramework
from hvdtrain.train.loop.step_plan import padded
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.session import train

BATCH, EPOCHS, SEED = 24, 2, 3  # 203 samples: 9 steps in an epoch, the last one of 11
LR = 1 / 16
ONE_WORKER = {"strategy": "ps:servers=2,staleness=0"}
COMMON: dict[str, Any] = {
    "framework": "keras", "backend": keras.backend.backend(), "engine": "mpi", "quiet": True,
    "global_batch_size": BATCH, "epochs": EPOCHS, "seed": SEED, "lr": LR, "lr_scaling": "none",
}  # fmt: skip


def recipe(*extra: Any, **parts: Any) -> Recipe:
    layers = keras.layers
    hidden = [layers.Dense(32, "relu", name="first"), *[make() for make in extra]]
    hidden += [layers.Dense(32, "tanh", name="second"), layers.Dense(CLASSES, name="scores")]
    plain = Recipe(
        model=keras.Sequential([keras.Input([6]), *hidden], name="net"),
        train=points(203, 0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        test=points(301, 1),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy(name="accuracy")},
    )
    return replace(plain, **parts)


def normed(**parts: Any) -> Recipe:
    seed = 5 if keras.backend.backend() != "torch" else None  # torch's own generator is seeded
    dropout = partial(keras.layers.Dropout, 0.5, seed=seed)
    return recipe(keras.layers.BatchNormalization, dropout, **parts)


def decayed(rate: Any) -> Any:
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, name="optimizer")
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta"])
    return optimizer


def plain_weights(make: Callable[[], Recipe], optimizer: Any, dtype: str) -> dict[str, Any]:
    options = TrainOptions(recipe="served.py:recipe", **COMMON, dtype=dtype)
    made = KerasFramework(options).build(make, context.current().topology)
    model, samples = made.model, made.train
    model.compile(optimizer, sum_over_samples(made.loss))
    steps = sampling.steps_per_epoch(len(samples), BATCH)
    pads = not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
    for number in range(EPOCHS * steps):
        order = sampling.epoch_permutation(len(samples), SEED, number // steps)
        batch = sampling.global_batch(order, number % steps, BATCH)
        rows, counted = padded(batch, BATCH if pads else len(batch))
        weights = (counted / counted.sum()).astype(dtype)
        sampling.seed_generators(sampling.step_seed(SEED, number, 0))
        inputs = samples.inputs[rows]
        inputs = inputs.astype(dtype) if inputs.dtype.kind == "f" else inputs
        model.train_on_batch(inputs, samples.labels[rows], weights)
        for callback in made.callbacks:
            callback.on_train_batch_end(SimpleNamespace(step=number + 1, optimizer=optimizer))
    return {v.path: np.array(keras.ops.convert_to_numpy(v)) for v in model.weights}


def distance(directory: Path, expected: dict[str, Any]) -> float:
    (newest, *_) = checkpoint_files(directory)
    found = load_checkpoint(newest, "np")["model"]
    assert found.keys() == expected.keys()
    return max(
        float(np.abs(found[path] - array).max() / max(np.abs(array).max(), 1e-3))
        for path, array in expected.items()
    )


def run(
    directory: Path,
    name: str,
    make: Callable[[], Recipe],
    strategy: dict[str, Any],
    optimizer: Callable[[], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    out = directory / name
    asked = TrainOptions(recipe="served.py:recipe", out=out, **{**COMMON, **strategy, **options})
    try:
        summary = train(asked, make)
    except UsageError as error:
        return {"refused": str(error)}
    if summary is None:
        return {}
    result = asdict(summary)
    allgather_object(None, "written")
    if optimizer is not None and context.current().topology.rank == 0:
        dtype = options.get("dtype", "float32")
        result["distance"] = distance(out, plain_weights(make, optimizer(), dtype))
    return result


def sgd() -> Any:
    return keras.optimizers.SGD(LR, momentum=0.9)


def adamw() -> Any:
    return decayed(LR)


class Changing(Callback):
    def on_train_batch_end(self, state: Any) -> None:
        if state.step == 4:
            state.optimizer.learning_rate = LR / 2


class Misled(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = LR / 2


def all_runs(directory: Path) -> dict[str, Any]:
    started = partial(run, directory)
    sync = {"strategy": "ps:mode=sync"}
    made = partial(normed, optimizer=decayed)
    with pytest.MonkeyPatch.context() as patches:
        stop_in_step(patches, 13)  # in the second epoch
        assert not started("stopped", made, ONE_WORKER)
    clipped = partial(recipe, optimizer=partial(keras.optimizers.SGD, clipnorm=1.0))
    limited = partial(
        recipe, partial(keras.layers.Dense, 8, kernel_constraint="non_neg", name="limited")
    )
    changing = partial(recipe, optimizer=lambda _: sgd(), callbacks=[Changing()])
    return {
        "sgd": started("sgd", normed, ONE_WORKER, sgd),
        "adamw": started("adamw", made, ONE_WORKER, adamw),
        "resumed": started("stopped", made, ONE_WORKER, adamw, resume="auto"),
        # Each strategy continues the other's checkpoints.
        "reduced": started("stopped", made, {}, resume="auto", epochs=EPOCHS + 1),
        "served": started("stopped", made, sync, resume="auto", epochs=EPOCHS + 2),
        "sync": started("sync", recipe, sync, sgd, dtype="float64"),
        "changed": started("changed", changing, ONE_WORKER, sgd),
        "misled": started("misled", partial(changing, callbacks=[Misled()]), sync),
        "clipped": started("clipped", clipped, sync),
        "limited": started("limited", limited, sync),
        "lamb": started("lamb", partial(recipe, optimizer=keras.optimizers.Lamb), sync),
    }


results = all_runs(Path(sys.argv[1]))
report(len(results), results)
