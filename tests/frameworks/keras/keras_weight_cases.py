"""Exchanges of weights after local steps in hvdtrain.keras, and models saved between them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from exchange_formulas import mean
from keras_fit_cases import Interrupt, Interrupted
from keras_formula import Batch, Simulated
from keras_optimizer_cases import SHAPES, assert_close, digest, gradients, own, stepped
from raising import raising

import hvdtrain.keras as hvd


def averaged_local_steps(of: Callable[[int, int], list[Any]]) -> list[Any]:
    """Return weights after five local steps of SGD, of which each second one ends in an average."""
    random = np.random.default_rng(0)
    start: list[Any] = [random.normal(size=s).astype(np.float32).astype(float) for s in SHAPES]
    ranks = [list(start) for _ in range(hvd.size())]
    for step in range(5):
        for rank, weights in enumerate(ranks):
            ranks[rank] = [w - 0.1 * g for w, g in zip(weights, of(step, rank), strict=True)]
        if step % 2 or step == 4:
            together = mean(ranks, [1.0] * hvd.size())
            ranks = [list(together) for _ in ranks]
    return ranks[0]


def a_rank_leaves_out_an_update_that_is_not_finite() -> str:
    """The last rank in the second step, and halves the scale of its own loss."""
    last = hvd.size() - 1

    def finite(step: int, rank: int) -> list[Any]:
        return [g * ((step, rank) != (1, last)) for g in gradients(step, rank)]

    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaling, exchange="local:steps=2,state=average")

    def scaled(step: int) -> list[Any]:
        scale = float(optimizer.dynamic_scale) if optimizer.built else 4.0
        infinite = (step, hvd.rank()) == (1, last)
        return [np.full_like(g, np.inf) if infinite else g * np.float32(scale) for g in own(step)]

    variables = stepped(optimizer, scaled, 5)
    assert not optimizer.synchronized
    with raising(RuntimeError, text="call flush"):
        optimizer.exchange_state()
    optimizer.flush()
    assert optimizer.synchronized
    assert optimizer.exchange_state()["steps"] == 5
    assert float(optimizer.dynamic_scale) == (2.0 if hvd.rank() == last else 4.0)
    assert_close(variables, averaged_local_steps(finite), rtol=1e-5)
    return digest(variables)


def line_model(exchange: str) -> Any:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
    model.compile(optimizer, loss="mse")
    return model


def line_batches(counts: list[int]) -> list[list[Batch]]:
    random = np.random.default_rng(7)
    return [
        [
            (random.normal(size=(rows, 3)), random.normal(size=(rows, 1)))
            for rows in [4] * (count - 1) + [3]
        ]
        for count in counts
    ]


def fit_line(model: Any, batches: list[list[Batch]], **how: Any) -> None:
    x, y = (np.concatenate(arrays) for arrays in zip(*batches[hvd.rank()], strict=True))
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **how)


class Weights(keras.callbacks.Callback):
    """Notes the weights before each validation and at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[str] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.digests.append(digest(self.model.trainable_variables))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.digests.append(digest(self.model.trainable_variables))


def fit_shows_equal_weights_in_validation() -> str:
    """Ranks take different numbers of steps, an odd number on rank 0."""
    random = np.random.default_rng(hvd.rank())
    count = 4 * (3 + hvd.rank())
    x, y = random.normal(size=(count, 3)), random.normal(size=(count, 1))
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange="local:steps=2")
    model.compile(optimizer, loss="mse")
    seen = Weights()
    for _ in range(2):
        model.fit(
            *(x, y), batch_size=4, verbose=0, epochs=2, callbacks=[seen], validation_data=(x, y)
        )
    assert len(seen.digests) == 8
    assert model.optimizer.synchronized
    return " ".join(seen.digests)


def what_does_not_go_with_weights_is_refused() -> None:
    def refused(exchange: str, inner: Any, text: str) -> None:
        with raising(ValueError, text=text):
            hvd.DistributedOptimizer(inner, exchange=exchange)

    sgd = keras.optimizers.SGD
    free, scaling = keras.optimizers.ScheduleFreeAdamW, keras.optimizers.LossScaleOptimizer
    refused("local:steps=2,state=reset", free(), "whose state begins with the weights")
    refused("blockmomentum:steps=2", scaling(sgd()), "LossScaleOptimizer, whose inner optimizer")
    if hasattr(keras.optimizers, "MultiOptimizer"):
        several = keras.optimizers.MultiOptimizer(lambda _: sgd())
        refused("local:steps=2", several, "needs one learning rate, and MultiOptimizer has several")
        with raising(ValueError, text="a MultiOptimizer does not accumulate gradients"):
            hvd.DistributedOptimizer(several, backward_passes_per_step=2)
    optimizer = hvd.DistributedOptimizer(sgd(), exchange="local:steps=2,state=average")
    with raising(ValueError, text="cannot leave one out: give state=keep"):
        optimizer.register_local_var(keras.Variable(np.zeros(2)))


def assert_holds(path: str, weights: list[Any]) -> None:
    model = line_model("local:steps=4")
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    kernel, bias = weights
    assert_close(model.weights, [kernel.reshape(3, 1), bias], rtol=1e-5)


def saves_in_an_epoch_show_averaged_weights() -> str:
    """Rank 0 saves: after each second batch, and backups after each third, of 5 on this rank.

    Another rank has four batches only, and takes part until rank 0 is at its end.
    """
    batches = line_batches([5, 4, 5][: hvd.size()])
    simulated = Simulated(batches, 0, 4)
    saves = [({1, 3}, {2}), ({0, 2, 4}, {0, 3})]  # of each epoch
    model = line_model("local:steps=4")
    found = [simulated.epoch(points | backups) for points, backups in saves]
    callbacks = [hvd.callbacks.RankZero(keras.callbacks.BackupAndRestore("line", save_freq=3))]
    if hvd.rank() == 0:  # of which other ranks know nothing, not even by RankZero
        path = "line-{epoch}-{batch}.weights.h5"
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2))
    with raising(Interrupted):
        fit_line(model, batches, epochs=3, callbacks=[*callbacks, Interrupt()])
    if hvd.rank() == 0:
        for epoch, (points, _) in enumerate(saves):
            for batch in points:
                assert_holds(f"line-{epoch + 1}-{batch + 1}.weights.h5", found[epoch][batch])
        assert len(list(Path().glob("line-*"))) == sum(len(points) for points, _ in saves)
        assert_holds("line/latest.weights.h5", found[1][3])
    return digest(model.weights)


class SaveAlone(keras.callbacks.Callback):
    """Saves after the first batch, as hvdtrain cannot know."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.save(f"alone-{hvd.rank()}.keras")


def drifted_weights_are_not_saved() -> None:
    batches = line_batches([2] * hvd.size())
    model = line_model("local:steps=4")
    refusal = f"[rank {hvd.rank()}/{hvd.size()}] save: the ranks' weights differ"
    with raising(RuntimeError, text=refusal):
        fit_line(model, batches, callbacks=[SaveAlone()])
    for save in (lambda: model.save("alone.keras"), lambda: model.save_weights("a.weights.h5")):
        with raising(RuntimeError, text="call optimizer.flush() on all ranks before"):
            save()
    model.optimizer.flush()
    model.save(f"alone-{hvd.rank()}.keras")
    assert Path(f"alone-{hvd.rank()}.keras").exists()
