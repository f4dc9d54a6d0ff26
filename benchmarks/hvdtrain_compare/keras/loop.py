"""Keras's `fit` under a strategy, and what it measures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.data.sampling import Indices, epoch_permutation
from hvdtrain.train.keras.metrics import sum_over_samples
from hvdtrain.train.loop.step_plan import padded
from hvdtrain_compare.keras.approach import Approach, exact_test_share
from hvdtrain_compare.keras.problem import Problem, make_problem, weights_of
from hvdtrain_compare.protocol.meters import SocketMeter, peak_memory_bytes
from hvdtrain_compare.protocol.rank_file import RankResult, Weights
from hvdtrain_compare.protocol.task import Place, Task

_EVALUATED_TOGETHER = 128


class _Meter(keras.callbacks.Callback):  # type: ignore[misc]
    """Times steps, and keeps the weights after some of them."""

    def __init__(self, check_after: int) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.sockets = SocketMeter()
        self.checked: Weights = {}
        self._check_after, self._started = check_after, 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, object] | None = None) -> None:
        """Begin the first step of an epoch."""
        self._started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, object] | None = None) -> None:
        """End a step, and begin the next."""
        self.seconds.append(time.perf_counter() - self._started)
        if len(self.seconds) == 1:
            self.sockets.start()  # the first step opens connections
        if len(self.seconds) == self._check_after:
            self.sockets.stop()
            self.checked = weights_of(self.model)
            self.sockets.start()
        self._started = time.perf_counter()


def train_keras(task: Task, place: Place, approach: Approach) -> RankResult:
    """Train the recipe under a strategy, evaluate it, and return what was measured."""
    problem = make_problem(task, place, approach)
    plan, options = problem.plan, problem.options
    trained: list[Indices] = []
    check_after, meter = task.check_steps, None
    epochs: list[float] = []
    for epoch in range(options.epochs):
        order = epoch_permutation(plan.samples, options.seed, epoch)
        shares = approach.shares(order, plan.global_batch_size, place)
        if meter is None:
            check_after = min(task.check_steps, len(shares) * options.epochs)
            meter = _Meter(check_after)
        batch = plan.global_batch_size
        sizes = [min(batch, len(order) - batch * step) for step in range(len(shares))]
        _fit(problem, approach, shares, sizes, [*approach.callbacks, meter], epoch)
        trained.append(np.concatenate(shares))
        epochs.append(sum(meter.seconds) - sum(epochs))
    assert meter is not None
    meter.sockets.stop()
    evaluated, scores = _evaluate(problem)
    keeps = task.keeps_weights and place.rank == 0
    return RankResult(
        library=approach.library,
        samples=plan.samples,
        test_samples=0 if problem.recipe.test is None else len(problem.recipe.test),
        threads=None,
        step_seconds=np.array(meter.seconds),
        epoch_seconds=np.array(epochs),
        trained=trained,
        evaluated=evaluated,
        scores=scores,
        checked_after=check_after,
        peak_memory_bytes=peak_memory_bytes(),
        socket_bytes_per_step=meter.sockets.per_step(len(meter.seconds) - 1),
        notes=approach.notes,
        checked_weights=meter.checked if keeps else {},
        final_weights=weights_of(problem.recipe.model) if keeps else {},
    )


def _fit(
    problem: Problem,
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


def _evaluate(problem: Problem) -> tuple[Indices, dict[str, tuple[float, float]]]:
    """Evaluate this process's test samples, and return them and the sums of their scores."""
    recipe = problem.recipe
    if recipe.test is None:
        return np.zeros(0, np.int64), {}
    own = np.array(exact_test_share(len(recipe.test), problem.place), np.int64)
    inputs, targets = problem.read(recipe.test, own)
    starts = range(0, len(own), _EVALUATED_TOGETHER)
    # Not predict(), which strategies of tf.distribute give each replica's outputs.
    outputs = [
        keras.ops.convert_to_numpy(
            recipe.model(inputs[start : start + _EVALUATED_TOGETHER], training=False)
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
