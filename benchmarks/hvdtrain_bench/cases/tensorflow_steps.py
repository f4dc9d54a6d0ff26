"""A step of TensorFlow in tf.function, with each library and without communication."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
import hvdtrain.keras as hvd_keras
import hvdtrain.tensorflow as hvd
from hvdtrain_bench.analysis.judge import HVDTRAIN, NO_COMMUNICATION, OPTIMIZER, SHARDED
from hvdtrain_bench.cases.checked import Agreement
from hvdtrain_bench.cases.keras_fits import CLASSES, HIDDEN, INPUTS, FirstWeights, mlp
from hvdtrain_bench.cases.peers import find_horovod
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Bench, Contender

BATCH = 16
_LR, _MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class StepLibrary:
    """How a library takes part in a training step. TensorFlow's types are not known to mypy."""

    # Wraps the tape, before it computes the gradients.
    tape: Callable[[Any], Any] = lambda tape: tape
    optimizer: Callable[[Any], Any] = lambda optimizer: optimizer
    # Calls the step, a function of inputs and targets.
    run: Callable[[Callable[[Any, Any], Any], Any, Any], Any] = lambda step, *batch: step(*batch)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    replicas: int = 1  # divisor of the loss, if the library sums gradients


class TensorFlowTrainer(FirstWeights):
    """Trains an MLP with SGD and momentum on one batch of this rank."""

    def __init__(self, rank: int, hidden: Sequence[int], library: StepLibrary) -> None:
        random = np.random.default_rng(rank)
        inputs = random.normal(size=(BATCH, INPUTS)).astype(np.float32)
        self._batch = tf.constant(inputs), tf.constant(random.integers(CLASSES, size=BATCH))
        with library.scope():
            super().__init__(lambda: mlp(hidden))
            optimizer = library.optimizer(keras.optimizers.SGD(_LR, momentum=_MOMENTUM))
            optimizer.build(self.model.trainable_variables)
        model, self._optimizer = self.model, optimizer

        def step(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(inputs, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
                loss = tf.reduce_mean(losses) / library.replicas
            # Horovod's tape does not take variables of Keras.
            own = [variable.value for variable in model.trainable_variables]
            gradients = library.tape(tape).gradient(loss, own)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        def run(inputs: Any, targets: Any) -> Any:
            return library.run(step, inputs, targets)

        self._step = tf.function(run, autograph=False)

    def restart(self) -> None:
        """Return to the first weights and to an optimizer without momentum (local)."""
        super().restart()
        for variable in self._optimizer.variables:
            if len(variable.shape):  # neither a rate nor a number of steps
                variable.assign(np.zeros(variable.shape, np.float32))

    def step(self) -> None:
        self._step(*self._batch).numpy()


_AGAIN, _STRATEGY = "hvdtrain again", "MultiWorkerMirroredStrategy"
_QUICK_HIDDEN = (64,)


def measure(bench: Bench) -> None:
    """Compare with Horovod, or with tf.distribute, whose servers may slow everything else."""
    ranks, settings = bench.ranks, bench.settings
    distributed = bench.result.kind == "tensorflow-strategy"
    strategy = _strategy(ranks) if distributed else None  # must be first in TensorFlow
    hidden = HIDDEN if "mlp" in settings.models else _QUICK_HIDDEN
    pairs = pairwise((INPUTS, *hidden, CLASSES))
    millions = sum((width + 1) * following for width, following in pairs) / 1e6
    name = f"TensorFlow MLP, {millions:.1f} M, {BATCH} samples per rank"
    bench.say(name)
    contenders = _contenders(ranks, hidden, strategy, bench.result.skipped)
    seconds = bench.take_turns(contenders, fewest_calls=settings.steps_per_turn)
    bench.add(name, seconds, HVDTRAIN, _AGAIN, model="mlp", samples=BATCH)


def _contenders(
    ranks: Ranks, hidden: tuple[int, ...], strategy: Any, skipped: dict[str, str]
) -> list[Contender]:
    version, agreement = f"TensorFlow {tf.__version__}", Agreement(ranks)

    def trainer(library: StepLibrary) -> TensorFlowTrainer:
        return TensorFlowTrainer(ranks.rank, hidden, library)

    own = f"hvdtrain {hvdtrain.__version__}, {version}"
    tape = StepLibrary(tape=hvd.DistributedGradientTape)
    optimizer = StepLibrary(optimizer=hvd_keras.DistributedOptimizer)
    sharded = StepLibrary(optimizer=lambda each: hvd_keras.DistributedOptimizer(each, sharded=True))
    found = [
        agreement.without_communication(NO_COMMUNICATION, version, trainer(StepLibrary())),
        agreement.together(HVDTRAIN, own, trainer(tape)),
        agreement.together(_AGAIN, own, trainer(tape)),
        agreement.together(OPTIMIZER, own, trainer(optimizer)),
        agreement.together(SHARDED, own, trainer(sharded)),
    ]
    if strategy is not None:
        mirrored = trainer(_mirrored(strategy, ranks.size))
        found.append(agreement.together(_STRATEGY, version, mirrored))
        return found
    horovod = find_horovod(ranks, "tensorflow", hvd, skipped)
    if horovod is not None:
        theirs = trainer(StepLibrary(tape=horovod.hvd.DistributedGradientTape))
        text = f"{horovod.library}, {version}"
        found.append(agreement.together("Horovod", text, theirs, horovod.turn))
    return found


def _mirrored(strategy: Any, replicas: int) -> StepLibrary:
    """Return how tf.distribute takes part; optimizers of Keras sum gradients in its steps."""
    return StepLibrary(
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
