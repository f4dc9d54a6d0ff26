"""Models that are saved while ranks exchange weights, against all ranks on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from keras_formula import Simulated
from keras_optimizer_cases import assert_close, digest
from keras_weight_cases import fit_line, line_batches, line_model
from raising import raising

import hvdtrain.keras as hvd


class Interrupted(Exception):
    """What ends a training."""


class Interrupt(keras.callbacks.Callback):
    """Ends the training of all ranks after two epochs."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise Interrupted


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
