"""Trains with Keras: train_frameworks_worker.py DIRECTORY EPOCHS; reports traces and distances."""

import importlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from forced_costs import force_choice
from nodes import nodes_of_their_own
from one_bit import OneBit
from ranks import report
from stopping import stop_in_step

from hvdtrain.cli.main import main
from hvdtrain.core import context
from hvdtrain.core.exchanges.catalog import EXCHANGES
from hvdtrain.core.objects import allgather_object
from hvdtrain.data.sampling import epoch_permutation, global_batch, steps_per_epoch
from hvdtrain.devices import DeviceWish
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoints import (
    checkpoint_files,
    load_checkpoint,
    position_of,
    write_checkpoint,
)
from hvdtrain.train.keras.loop import KerasTrainingState
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes import keras_recipes
from hvdtrain.train.run import weights_digest
from hvdtrain.train.session import train

BATCH = 50  # 1437 samples are 28 batches of 50 and one of 37
LR = 1 / 16  # which Keras keeps in float32


class Counted(keras.losses.SparseCategoricalCrossentropy):
    """Counts how often Python runs through it: once for each trace, or in every step."""

    calls = 0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        type(self).calls += 1
        return super().call(y_true, y_pred)


def counted(plain: Callable[[], Recipe]) -> Recipe:
    return replace(plain(), loss=Counted(from_logits=True))


def whole_job(arguments: list[str], directory: Path) -> int:
    Counted.calls = 0
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(keras_recipes, "digits", partial(counted, keras_recipes.digits))
        with pytest.raises(SystemExit) as end:
            main(["train", "digits", *arguments, "--out", str(directory)])
    assert not end.value.code
    return Counted.calls


def resumed_job(options: dict[str, Any], whole: Path, parts: Path) -> None:
    """Go on from all but the last checkpoint of a run, stop within the epoch, and go on."""
    if context.current().topology.rank == 0:
        shutil.copytree(whole, parts)
        for path in parts.glob(f"*-{options['epochs']:04d}-*"):  # maybe the best one, too
            path.unlink()
        (parts / "summary.json").unlink()
    allgather_object(None, "copied")
    resumed = TrainOptions(out=parts, resume="auto", quiet=True, **options)
    with pytest.MonkeyPatch.context() as patches:
        stop_in_step(patches, 5)
        assert train(resumed) is None
    assert position_of(checkpoint_files(parts)[0])[1] == 5 * resumed.samples_per_step(2)
    allgather_object(None, "looked")
    train(resumed)


# Ranks keep what one bit has lost, or a velocity of all ranks, and have each an Adam of their own.
EXCHANGED = (
    *("onebit:hierarchical=false,warmup=1", "postlocal:after=2,steps=2,state=average"),
    *("postlocal:after=rate,steps=2", "blockmomentum:block=960"),
    *("blockmomentum:steps=2,state=average", "local:steps=2,state=reset"),
    *("diloco:steps=2,state=reset", "diloco:steps=2,fragments=2", "auto:allow=half,steps=1"),
)


def exchange_goes_on(options: dict[str, Any], directory: Path, exchange: str) -> bool:
    """Return whether a run that goes on from a checkpoint ends with the bits of a whole one.

    Both save after the third step, and compare the ranks whenever their weights are equal.
    """
    how: dict[str, Any] = {
        **options,
        "epochs": 2,
        "global_batch_size": 480,
        "optimizer": "adam",
        "exchange": exchange,
        "lr_scaling": "none",
        "schedule": "step",
        "milestones": "1",  # the rate falls right after that checkpoint
        "checkpoint_every": "3 steps",
        "watch_every": 1,
    }
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(EXCHANGES, "onebit", OneBit)
        force_choice(patches)  # else it depends on what a run has measured
        whole = train(TrainOptions(out=directory / "whole", quiet=True, **how))
        with pytest.MonkeyPatch.context() as stopping:
            stop_in_step(stopping, 3)
            assert train(TrainOptions(out=directory / "parts", quiet=True, **how)) is None
        parts = train(TrainOptions(out=directory / "parts", resume="auto", quiet=True, **how))
    assert whole is not None
    assert parts is not None
    assert (whole.steps, len(set(whole.weights_sha256))) == (6, 1)
    return parts.weights_sha256 == whole.weights_sha256


def regularized(plain: Callable[[], Recipe]) -> Recipe:
    recipe = plain()
    for variable in recipe.model.trainable_variables:
        variable.regularizer = keras.regularizers.L2(0.01)
    return recipe


def normalized(plain: Callable[[], Recipe]) -> Recipe:
    """Normalizes over all ranks, which have 19 and 18 samples of the last batch."""
    layer = importlib.import_module("hvdtrain.tensorflow").SyncBatchNormalization
    layers = [keras.layers.Flatten(), layer(name="normal"), keras.layers.Dense(10, name="dense")]
    model = keras.Sequential([keras.Input([1, 8, 8]), *layers], name="digits")
    return replace(plain(), model=model)


def frozen(plain: Callable[[], Recipe]) -> Recipe:
    """Normalizes by its moving statistics, with which padding has nothing to do."""
    layer = keras.layers.BatchNormalization(name="normal", trainable=False)
    layers = [keras.layers.Flatten(), layer, keras.layers.Dense(10, name="dense")]
    model = keras.Sequential([keras.Input([1, 8, 8]), *layers], name="digits")
    return replace(plain(), model=model)


def distance_from_plain_keras(
    options: dict[str, Any], directory: Path, momentum: float = 0.9
) -> float:
    how: dict[str, Any] = {"epochs": 1, "global_batch_size": BATCH, "lr": LR, "lr_scaling": "none"}
    how |= {"dtype": "float64", "seed": 3, "momentum": momentum, **options}
    train(TrainOptions(out=directory, quiet=True, **how))
    allgather_object(None, "written")
    found = load_checkpoint(checkpoint_files(directory)[0], "np")["model"]
    plain = weights_of_plain_keras(momentum, how["global_batch_size"])
    assert plain.keys() == found.keys()
    return max(float(np.abs(found[path] - plain[path]).max()) for path in plain)


@cache
def weights_of_plain_keras(momentum: float, batch_size: int) -> dict[str, Any]:
    keras.utils.set_random_seed(3)  # of rank 0
    recipe = keras_recipes.digits()
    model, samples = recipe.model, recipe.train
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.compile(keras.optimizers.SGD(LR, momentum=momentum), loss)
    order = epoch_permutation(len(samples), 3, 0)
    for step in range(steps_per_epoch(len(samples), batch_size)):
        batch = global_batch(order, step, batch_size)
        model.train_on_batch(
            samples.inputs[batch].astype("float64"),
            samples.labels[batch],
            np.full(len(batch), 1 / len(batch)),
        )
    return {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}


def masks_of_dropout_go_on(directory: Path) -> bool:
    """Return whether this rank's weights are those that they were, when it goes on from rank 0's.

    Each rank trains for itself, so that its own masks show in its weights.
    """
    rank, samples = context.current().topology.rank, np.ones((8, 3), "float32")

    def build() -> tuple[Any, KerasTrainingState]:
        # With a seed: without one, Keras on torch takes torch's own generator.
        layers = [keras.layers.Dropout(0.5, seed=rank), keras.layers.Dense(2, name="dense")]
        model = keras.Sequential([keras.Input((3,)), *layers], name="net")
        model.compile(keras.optimizers.Adam(name="adam"), "mse")
        model.optimizer.build(model.trainable_variables)
        return model, KerasTrainingState(model, model.optimizer)

    def steps(model: Any) -> None:
        for _ in range(2):
            model.train_on_batch(samples, samples[:, :2])

    model, state = build()
    steps(model)
    saved = state.snapshot()()
    mine = directory / str(rank)
    mine.mkdir(parents=True)
    content = load_checkpoint(write_checkpoint(mine, 0, 2, {"epoch": 0, **saved}, "np"), "np")
    steps(model)
    assert content["counters"] == [2] != state.counters()
    model, again = build()
    again.load(content if rank == 0 else {**content, "counters": [9]})
    again.broadcast_counters()
    steps(model)
    return weights_digest(again.weights()) == weights_digest(state.weights())


def diverged(options: dict[str, Any], directory: Path) -> str:
    how: dict[str, Any] = {"epochs": 2, "global_batch_size": 500, "lr": 1e30}
    with pytest.raises(TrainingError) as end:
        train(TrainOptions(out=directory, quiet=True, **how, **options))
    assert not checkpoint_files(directory)
    return str(end.value)


def pinned_gpu() -> int:
    """Return which of two GPUs, which are not there, this rank would take on this backend."""
    here: Topology = context.current().topology
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patches:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            from hvdtrain.train.keras.framework import pin_tensorflow

            gpus = ["GPU a", "GPU b"]
            patches.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
            patches.setattr(tf.config, "set_visible_devices", lambda *each: told.append(each))
            index = pin_tensorflow(here, DeviceWish())
            assert index is not None
            assert told == [(gpus[index], "GPU")]
            return index
        import jax

        from hvdtrain.train.keras import framework

        patches.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        patches.setattr(framework, "_has_gpu_plugin", lambda: True)
        patches.setattr(jax.config, "update", lambda *each: told.append(each))
        index = framework.pin_jax(here, DeviceWish())
        assert index is not None
        assert told == [("jax_cuda_visible_devices", str(index))]
        return index


def all_jobs(directory: Path, epochs: str) -> dict[str, Any]:
    options: dict[str, Any] = {"framework": "keras", "backend": keras.backend.backend()}
    arguments = ["--framework", "keras", "--epochs", epochs, "--backend", options["backend"]]
    if keras.backend.backend() == "torch":
        options["engine"] = "gloo"
        arguments += ["--engine", "gloo"]
    calls = whole_job(arguments, directory / "whole")
    resumed_job({"epochs": int(epochs), **options}, directory / "whole", directory / "parts")
    if keras.backend.backend() == "torch":  # which compiles nothing, and is fastest
        for number, exchange in enumerate(EXCHANGED):
            with nodes_of_their_own():
                on = exchange_goes_on(options, directory / f"exchange{number}", exchange)
            assert on, exchange
    if keras.backend.backend() != "tensorflow":  # weights of samples are the same on all
        return {"calls": calls, "distance": 0.0}
    assert diverged(options, directory / "diverged").startswith("steps 1 to 3: the training loss")
    # Gradients are averaged, then weights after each step; an odd number of samples is the last
    # batch of the epoch.
    local = {**options, "exchange": "postlocal:after=9,steps=1"}
    served = {**options, "strategy": "ps"}  # one worker and one server
    patch = pytest.MonkeyPatch()
    patch.setattr(keras_recipes, "digits", partial(regularized, keras_recipes.digits))
    distances = [
        distance_from_plain_keras(served, directory / "served"),
        distance_from_plain_keras(options, directory / "exact"),
        distance_from_plain_keras({**options, "shard_optimizer": True}, directory / "shared"),
        distance_from_plain_keras(local, directory / "local", momentum=0.0),
    ]
    patch.undo()
    weights_of_plain_keras.cache_clear()
    patch.setattr(keras_recipes, "digits", partial(normalized, keras_recipes.digits))
    distances.append(distance_from_plain_keras(options, directory / "normalized"))
    tiny = {**options, "global_batch_size": 718}  # of 1437 samples the last batch has one
    with pytest.raises(UsageError, match="BatchNormalization needs one on each"):
        train(TrainOptions(out=directory / "tiny", quiet=True, **tiny))
    patch.undo()
    patch.setattr(keras_recipes, "digits", partial(frozen, keras_recipes.digits))
    distances.append(distance_from_plain_keras(tiny, directory / "frozen"))
    patch.undo()
    return {"calls": calls, "distance": max(distances)}


results = all_jobs(Path(sys.argv[1]), sys.argv[2])
results["dropout"] = {"goes on": masks_of_dropout_go_on(Path(sys.argv[1]) / "dropout")}
if keras.backend.backend() != "torch":  # whose choice of a device has tests of its own
    results["gpu"] = {"index": pinned_gpu(), "local_rank": context.current().topology.local_rank}
report(len(results), results)
