"""A step of TensorFlow in tf.function, with each library and without communication."""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from math import isclose, isfinite
from typing import Any

import tensorflow as tf

import hvdtrain
import hvdtrain.keras as hvd_keras
import hvdtrain.tensorflow as hvd
from hvdtrain_bench.cases.sums import WrongResultError
from hvdtrain_bench.cases.tensorflow_trainer import (
    BATCH,
    CLASSES,
    INPUTS,
    Library,
    TensorFlowTrainer,
)
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.harness.settings import Settings
from hvdtrain_bench.harness.turns import Contender, take_turns

_BASE, _AGAIN, _LIMIT = "hvdtrain", "hvdtrain again", "no communication"
_SHARDED, _STRATEGY = "hvdtrain, sharded", "MultiWorkerMirroredStrategy"
# The MLP of the other benchmarks, and a small one for --quick.
_HIDDEN, _QUICK_HIDDEN = (2048,) * 6, (64,)
_AGREEMENT = 1e-4


def measure_tensorflow(
    ranks: Ranks, settings: Settings, say: Callable[[str], None], distributed: bool
) -> Result:
    """Time a step of an MLP with every library (collective).

    Args:
        distributed: whether to compare with tf.distribute, whose servers may slow everything beside
            them, instead of Horovod.
    """
    strategy = _strategy(ranks) if distributed else None  # must be first in TensorFlow
    hidden = _HIDDEN if "mlp" in settings.models else _QUICK_HIDDEN
    pairs = pairwise((INPUTS, *hidden, CLASSES))
    millions = sum((width + 1) * following for width, following in pairs) / 1e6
    name = f"TensorFlow MLP, {millions:.1f} M, {BATCH} samples per rank"
    say(name)
    skipped: dict[str, str] = {}
    contenders = _contenders(ranks, hidden, strategy, skipped)
    turns = take_turns(ranks, contenders, settings.repeats, 0.0, settings.steps_per_turn)
    about = {"model": "mlp", "samples": BATCH}
    case = Case(name, about, "seconds", turns.seconds, _BASE, _AGAIN)
    kind = "tensorflow-strategy" if distributed else "tensorflow"
    return Result(kind, ranks.size, 1, turns.peers, skipped, [case])


def _contenders(
    ranks: Ranks, hidden: tuple[int, ...], strategy: Any, skipped: dict[str, str]
) -> list[Contender]:
    version = f"TensorFlow {tf.__version__}"
    expected: dict[int, float] = {}

    def contender(
        name: str,
        text: str,
        library: Library,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Contender:
        trainer = TensorFlowTrainer(ranks.rank, hidden, library)

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

    own = f"hvdtrain {hvdtrain.__version__}, {version}"
    tape = Library(tape=hvd.DistributedGradientTape)
    sharded = Library(optimizer=lambda each: hvd_keras.DistributedOptimizer(each, sharded=True))
    found = [
        contender(_LIMIT, version, Library()),
        contender(_BASE, own, tape),
        contender(_AGAIN, own, tape),
        contender(_SHARDED, own, sharded),
    ]
    if strategy is not None:
        found.append(contender(_STRATEGY, version, _mirrored(strategy, ranks.size)))
        return found
    horovod = _horovod(ranks, skipped)
    if horovod is not None:
        text = f"Horovod {importlib.import_module('horovod').__version__}, {version}"

        @contextmanager
        def turn() -> Any:
            horovod.init()  # its thread polls while it is initialized
            yield
            horovod.shutdown()

        theirs = Library(tape=lambda tape: horovod.DistributedGradientTape(tape))
        found.append(contender("Horovod", text, theirs, turn))
    return found


def _mirrored(strategy: Any, replicas: int) -> Library:
    """Return how tf.distribute takes part; optimizers of Keras sum gradients in its steps."""
    return Library(
        run=lambda step, *batch: strategy.run(step, args=batch),
        scope=strategy.scope,
        replicas=replicas,
    )


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
