"""Training with Keras: recipe and `fit`, which all strategies share, and what each does else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.data.sampling import Indices, epoch_permutation, seed_generators
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.topology import Topology
from hvdtrain.train.keras.fit import (
    SampleReader,
    StepPlanSchedule,
    plain_optimizer,
    sum_over_samples,
)
from hvdtrain.train.loop.step_plan import StepPlan, padded
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipe_loader import load_recipe
from hvdtrain_bench.compare.meters import (
    EVALUATED_TOGETHER,
    ContenderTask,
    Division,
    ExactDivision,
    ProcessPlace,
    RankResult,
    ShardedDivision,
    StepMeter,
    Weights,
)


@dataclass(frozen=True)
class Approach:
    library: str
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: Callable[[Any], Any] = lambda optimizer: optimizer
    division: Callable[[ProcessPlace, int], Division] = ExactDivision
    scale: float = 1.0
    callbacks: Sequence[Any] = ()
    notes: list[str] = field(default_factory=list)


# numpy takes 32 bits.
_SEEDS = 2**32
_FIRST_WEIGHTS = "first_weights.npz"


@dataclass(frozen=True)
class KerasProblem:
    place: ProcessPlace
    recipe: Recipe
    plan: StepPlan
    options: TrainOptions

    @property
    def rows(self) -> int:
        """Samples in each batch of this process, padding included."""
        return -(-self.plan.global_batch_size // self.place.size)

    def read(self, data: Any, rows: Indices, epoch: int = 0) -> tuple[Any, Any]:
        augment = self.recipe.augment if data is self.recipe.train else None
        reader = SampleReader(data, self.options.dtype, self.options.seed, augment)
        return reader.read(rows, epoch)


def make_problem(task: ContenderTask, place: ProcessPlace, approach: Approach) -> KerasProblem:
    options = task.options
    alone = Topology.from_nodes(0, [0], ["localhost"])
    make_recipe = load_recipe(options)
    keras.config.set_floatx(options.dtype)
    keras.config.set_dtype_policy(options.dtype)
    keras.utils.set_random_seed(options.seed % _SEEDS)
    seed_generators(options.seed)
    with approach.scope():
        recipe = make_recipe()
        _require_keras(options.recipe, recipe)
        samples = recipe.samples_per_epoch or len(recipe.train)
        plan = StepPlan(options, alone, samples, ranks=task.ranks)
        _set_first_weights(recipe.model, task.shared / _FIRST_WEIGHTS, place)
        optimizer = approach.optimizer(plain_optimizer(recipe, options, StepPlanSchedule(plan)))
        recipe.model.compile(optimizer, sum_over_samples(recipe.loss))
    return KerasProblem(place, recipe, plan, options)


def _require_keras(name: str, recipe: Recipe) -> None:
    for part, kind in (("model", keras.Model), ("loss", keras.losses.Loss)):
        found = getattr(recipe, part)
        if not isinstance(found, kind):
            raise UsageError(
                f"the {part} of {name} is a {type(found).__name__}, not a keras.{kind.__name__}"
            )


def _set_first_weights(model: Any, path: Path, place: ProcessPlace) -> None:
    """Take the weights that the reference has written; the reference, which is first, writes them.

    Backends of Keras draw different numbers from the same seed.
    """
    if path.exists():
        with np.load(path) as file:
            model.set_weights([file[name] for name in file.files])
    elif place.rank == 0:
        with replacing(path) as file:
            np.savez(file, *model.get_weights())


def weights_of(model: Any) -> Weights:
    """Return a copy of the weights that are trained, by name."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # within fit, variables are not current
    variables = model.trainable_variables
    return {one.path: np.array(keras.ops.convert_to_numpy(one)) for one in variables}


class _Meter(keras.callbacks.Callback, StepMeter):  # type: ignore[misc]
    def __init__(self, check_after: int) -> None:
        keras.callbacks.Callback.__init__(self)
        StepMeter.__init__(self, check_after)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        self.begin()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        self.end_step(lambda: weights_of(self.model))


def train_keras(task: ContenderTask, place: ProcessPlace, approach: Approach) -> RankResult:
    """Train the recipe under a strategy, evaluate it, and return what was measured."""
    problem = make_problem(task, place, approach)
    plan, options = problem.plan, problem.options
    meter, batch = None, plan.global_batch_size
    division = approach.division(place, batch)
    for epoch in range(options.epochs):
        order = epoch_permutation(plan.samples, options.seed, epoch)
        shares = division.train_shares(order)
        meter = meter or _Meter(min(task.check_steps, len(shares) * options.epochs))
        sizes = [min(batch, len(order) - batch * step) for step in range(len(shares))]
        _fit(problem, approach, shares, sizes, [*approach.callbacks, meter], epoch)
        meter.end_epoch(shares)
    assert meter is not None
    meter.stop()
    evaluated, scores = _evaluate(problem, division)
    return meter.result(
        task,
        place,
        lambda: weights_of(problem.recipe.model),
        library=approach.library,
        samples=plan.samples,
        test_samples=0 if problem.recipe.test is None else len(problem.recipe.test),
        threads=None,
        evaluated=evaluated,
        scores=scores,
        notes=approach.notes,
    )


def _fit(
    problem: KerasProblem,
    approach: Approach,
    shares: Sequence[Indices],
    sizes: Sequence[int],
    callbacks: Sequence[Any],
    epoch: int,
) -> None:
    """Call `fit` for one epoch; batches are padded to one length with samples of weight 0."""
    parts = [padded(share, problem.rows) for share in shares]
    inputs, targets = problem.read(
        problem.recipe.train, np.concatenate([rows for rows, _ in parts]), epoch
    )
    weights = [
        approach.scale / size * counted for size, (_, counted) in zip(sizes, parts, strict=True)
    ]
    problem.recipe.model.fit(
        inputs,
        targets,
        sample_weight=np.concatenate(weights).astype(problem.options.dtype),
        batch_size=problem.rows,
        epochs=1,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )


def _evaluate(
    problem: KerasProblem, division: Division
) -> tuple[Indices, dict[str, tuple[float, float]]]:
    """Evaluate this process's test samples, and return them and the sums of their scores."""
    recipe = problem.recipe
    if recipe.test is None:
        return np.zeros(0, np.int64), {}
    own = division.test_share(len(recipe.test))
    inputs, targets = problem.read(recipe.test, own)
    starts = range(0, len(own), EVALUATED_TOGETHER)
    # Not predict(), which strategies of tf.distribute give each replica's outputs.
    outputs = [
        keras.ops.convert_to_numpy(
            recipe.model(inputs[start : start + EVALUATED_TOGETHER], training=False)
        )
        for start in starts
    ]
    together = np.concatenate(outputs)
    scores = {"loss": (float(sum_over_samples(recipe.loss)(targets, together)), float(len(own)))}
    for name, metric in recipe.metrics.items():
        if isinstance(metric, keras.metrics.MeanMetricWrapper):
            metric.reset_state()
            metric.update_state(targets, together)
            scores[name] = float(metric.result()) * len(own), float(len(own))
    return own, scores


def _hvdtrain(task: ContenderTask, place: ProcessPlace) -> Approach:
    import hvdtrain.keras as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context

    hvd.init()
    sharded = task.variant == "sharded"
    exchange = None if sharded else task.variant or None
    mpi = context.current().library.partition(" (")[0]
    return Approach(
        library=f"hvdtrain {__version__} on {mpi}, Keras on {keras.backend.backend()}",
        optimizer=lambda own: hvd.DistributedOptimizer(own, exchange=exchange, sharded=sharded),
        scale=float(place.size),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )


def _horovod(task: ContenderTask, place: ProcessPlace) -> Approach:
    import horovod
    import horovod.keras as hvd

    hvd.init()
    return Approach(
        library=f"Horovod {horovod.__version__}",
        optimizer=hvd.DistributedOptimizer,
        division=ShardedDivision,
        scale=float(place.size),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )


def _mirrored(task: ContenderTask, place: ProcessPlace) -> Approach:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(task.ranks)]
    tf.config.set_logical_device_configuration(cpu, devices)
    names = [f"CPU:{number}" for number in range(task.ranks)]
    return Approach(
        library=f"TensorFlow {tf.__version__}",
        scope=tf.distribute.MirroredStrategy(names).scope,
        notes=[f"one process with {task.ranks} logical devices of the CPU"],
    )


def _jax_distribution(task: ContenderTask, place: ProcessPlace) -> Approach:
    flags = f"--xla_force_host_platform_device_count={task.ranks}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    import jax

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return Approach(
        library=f"Keras {keras.__version__} on JAX {jax.__version__}",
        notes=[f"one process with {len(jax.devices())} devices of the CPU"],
    )


_WAYS: Mapping[str, Callable[[ContenderTask, ProcessPlace], Approach]] = {
    "one": lambda *_: Approach(f"Keras {keras.__version__} on {keras.backend.backend()}"),
    "hvdtrain": _hvdtrain,
    "horovod": _horovod,
    "mirrored": _mirrored,
    "jax-distribution": _jax_distribution,
}


def train(task: ContenderTask, place: ProcessPlace) -> RankResult:
    return train_keras(task, place, _WAYS[task.strategy](task, place))
