"""A step of TensorFlow in tf.function, with each library and without communication."""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from math import isclose, isfinite
from typing import Any

import numpy as np
import tensorflow as tf

import hvdtrain
import hvdtrain.tensorflow as hvd
from hvdtrain_bench.cases.sums import WrongResultError
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.harness.settings import Settings
from hvdtrain_bench.harness.turns import Contender, take_turns

__all__ = ["measure_tensorflow"]

_BASE, _AGAIN, _LIMIT = "hvdtrain", "hvdtrain again", "no communication"
_STRATEGY = "MultiWorkerMirroredStrategy"
_INPUTS, _CLASSES = 1024, 1024
# The MLP of the other benchmarks, and a small one for --quick.
_HIDDEN, _QUICK_HIDDEN = (2048,) * 6, (64,)
_BATCH, _LR = 16, 0.01
_AGREEMENT = 1e-4

# A training step: from inputs and targets to the loss. TensorFlow's types are not known to mypy.
Step = Callable[[Any, Any], Any]
# Returns a step that trains these variables.
Wrap = Callable[[list[Any]], Step]


def measure_tensorflow(
    ranks: Ranks, settings: Settings, say: Callable[[str], None], distributed: bool
) -> Result:
    """Time a step of an MLP with every library (collective).

    Args:
        ranks: all ranks.
        settings: number of repeats and of steps.
        say: prints what is measured now.
        distributed: whether to compare with tf.distribute, whose servers may slow everything beside
            them, instead of Horovod.
    """
    strategy = _strategy(ranks) if distributed else None  # must be first in TensorFlow
    widths = (_INPUTS, *(_HIDDEN if "mlp" in settings.models else _QUICK_HIDDEN), _CLASSES)
    millions = sum((width + 1) * following for width, following in pairwise(widths)) / 1e6
    name = f"TensorFlow MLP, {millions:.1f} M, {_BATCH} samples per rank"
    say(name)
    skipped: dict[str, str] = {}
    contenders = _contenders(ranks, widths, strategy, skipped)
    turns = take_turns(ranks, contenders, settings.repeats, 0.0, settings.steps_per_turn)
    about = {"model": "mlp", "samples": _BATCH}
    case = Case(name, about, "seconds", turns.seconds, _BASE, _AGAIN)
    kind = "tensorflow-strategy" if distributed else "tensorflow"
    return Result(kind, ranks.size, 1, turns.peers, skipped, [case])


def _contenders(
    ranks: Ranks, widths: tuple[int, ...], strategy: Any, skipped: dict[str, str]
) -> list[Contender]:
    library = f"TensorFlow {tf.__version__}"
    expected: dict[int, float] = {}

    def contender(
        name: str,
        text: str,
        wrap: Wrap,
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Contender:
        trainer = _Trainer(ranks.rank, widths, wrap, scope)

        def check(calls: int) -> None:
            moved = trainer.moved()
            if not isfinite(moved) or moved <= 0:
                raise WrongResultError(f"{ranks.title} {name}: the weights moved by {moved}")
            for value in [] if name == _LIMIT else ranks.all_of(moved):
                if not isclose(value, expected.setdefault(calls, value), rel_tol=_AGREEMENT):
                    raise WrongResultError(
                        f"{ranks.title} {name}: {calls} steps moved the weights by {value:.9g}, "
                        f"not by {expected[calls]:.9g}"
                    )

        return Contender(name, text, trainer.restart, trainer.step, check, turn=turn, meets=True)

    own = f"hvdtrain {hvdtrain.__version__}, {library}"
    found = [
        contender(_LIMIT, library, _alone),
        contender(_BASE, own, _with(hvd.DistributedGradientTape)),
        contender(_AGAIN, own, _with(hvd.DistributedGradientTape)),
    ]
    if strategy is not None:
        found.append(contender(_STRATEGY, library, _mirrored(strategy), strategy.scope))
        return found
    horovod = _horovod(ranks, skipped)
    if horovod is not None:
        version = importlib.import_module("horovod").__version__

        @contextmanager
        def turn() -> Any:
            horovod.init()  # its thread polls while it is initialized
            yield
            horovod.shutdown()

        wrap = _with(lambda tape: horovod.DistributedGradientTape(tape))
        found.append(contender("Horovod", f"Horovod {version}, {library}", wrap, turn=turn))
    return found


class _Trainer:
    def __init__(
        self,
        rank: int,
        widths: tuple[int, ...],
        wrap: Wrap,
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._widths = widths
        self._wrap, self._scope = wrap, scope
        self._variables: list[Any] = []
        random = np.random.default_rng(rank)
        self._inputs = random.normal(size=(_BATCH, _INPUTS)).astype(np.float32)
        self._targets = random.integers(_CLASSES, size=_BATCH)
        self._batch: tuple[Any, Any] | None = None

    def restart(self) -> None:
        if self._batch is None:
            self._batch = tf.constant(self._inputs), tf.constant(self._targets)
            with self._scope():
                self._variables = [
                    tf.Variable(array, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
                    for array in _first_weights(self._widths)
                ]
            self._run = self._wrap(self._variables)
        for variable, array in zip(self._variables, _first_weights(self._widths), strict=True):
            variable.assign(array)

    def step(self) -> None:
        assert self._batch is not None
        self._run(*self._batch).numpy()

    def moved(self) -> float:
        return sum(
            float(np.abs(variable.numpy() - array).sum(dtype=np.float64))
            for variable, array in zip(self._variables, _first_weights(self._widths), strict=True)
        )


def _first_weights(widths: tuple[int, ...]) -> list[Any]:
    random = np.random.default_rng(0)
    arrays: list[Any] = []
    for width, following in pairwise(widths):
        spread = np.float32(np.sqrt(2 / width))
        arrays.append(random.standard_normal((width, following), np.float32) * spread)
        arrays.append(np.zeros(following, np.float32))
    return arrays


def _loss(variables: Sequence[Any], inputs: Any, targets: Any) -> Any:
    hidden = inputs
    for number in range(0, len(variables), 2):
        hidden = (tf.nn.relu(hidden) if number else hidden) @ variables[number]
        hidden += variables[number + 1]
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, hidden))


def _with(distribute: Callable[[Any], Any]) -> Wrap:
    """Return a step that uses the gradients of a tape that `distribute` has wrapped."""

    def wrap(variables: list[Any]) -> Step:
        def run(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(variables, inputs, targets)
            gradients = distribute(tape).gradient(loss, variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(_LR * gradient)
            return loss

        compiled: Step = tf.function(run, autograph=False)
        return compiled

    return wrap


_alone = _with(lambda tape: tape)


def _mirrored(strategy: Any) -> Wrap:
    def wrap(variables: list[Any]) -> Step:
        def replica(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(variables, inputs, targets)
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("MEAN", tape.gradient(loss, variables))
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(_LR * gradient)
            return loss

        def run(inputs: Any, targets: Any) -> Any:
            return strategy.run(replica, args=(inputs, targets))

        compiled: Step = tf.function(run, autograph=False)
        return compiled

    return wrap


def _strategy(ranks: Ranks) -> Any:
    """Make the strategy of tf.distribute for these ranks, all on this host (collective)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        workers = ranks.all_of(f"127.0.0.1:{taken.getsockname()[1]}")
    task = {"type": "worker", "index": ranks.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return tf.distribute.MultiWorkerMirroredStrategy()


def _horovod(ranks: Ranks, skipped: dict[str, str]) -> Any:
    problem, module = "", None
    try:
        module = importlib.import_module("horovod.tensorflow")
        if module is hvd:
            problem = "hvdtrain itself answers its name here: take it from PYTHONPATH"
    except (ImportError, OSError) as error:
        problem = f"{error}: python -m hvdtrain build-horovod"
    problem = ranks.reason(problem)
    if problem:
        skipped["Horovod"] = problem
    return None if problem else module
