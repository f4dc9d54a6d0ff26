"""`fit` on ranks whose data, callbacks or decisions differ."""

import importlib.util
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_fit_cases import (
    ROWS,
    STEPS,
    Batches,
    Interrupt,
    Interrupted,
    Traced,
    data,
    dense_model,
    fit,
    shared_model,
    start,
)
from keras_formula import Batch, by_formula, loss_of
from keras_optimizer_cases import assert_close, digest
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.keras.backends.distributed import training_state

# Rows of each batch of an epoch, by rank.
UNEVEN = [[ROWS, ROWS, 3], [ROWS, 1], [1]]
EQUAL_STEPS = [[ROWS, 3], [ROWS, 1], [1, 3]]


def batches(rows: list[list[int]], rank: int) -> list[Batch]:
    random = np.random.default_rng(rank)
    return [
        (random.normal(size=(n, 3)).astype("f4"), random.normal(size=(n, 2)).astype("f4"))
        for n in rows[rank]
    ]


def of_all_ranks(rows: list[list[int]]) -> list[Batch]:
    every = [batches(rows, rank) for rank in range(hvd.size())]
    return [
        (np.concatenate([x for x, _ in step]), np.concatenate([y for _, y in step]))
        for step in [[own[n] for own in every if n < len(own)] for n in range(len(every[0]))]
    ]


def uneven_data_end_together() -> str:
    """Gradients count by samples, and a rank that has none any more stays in step.

    A generator does not say how many batches it has, and is there for one epoch.
    """
    ends = []
    for rows, epochs in ((EQUAL_STEPS, 2), (UNEVEN, 2), (UNEVEN, 1)):
        model = shared_model()
        weights = [np.array(weight, np.float64) for weight in model.get_weights()]
        own, together = batches(rows, hvd.rank()), of_all_ranks(rows)
        history = model.fit(
            Batches(own) if epochs > 1 else (batch for batch in own),
            epochs=epochs,
            shuffle=False,
            verbose=0,
            validation_data=together[0],
            callbacks=start(),
        ).history
        by_formula(weights, epochs * together)
        assert_close(model.weights, weights)
        if epochs > 1:  # Keras on TensorFlow takes a step more than a generator has batches
            assert int(model.optimizer.iterations) == epochs * len(together)
        validated = loss_of(weights, *together[0])
        np.testing.assert_allclose(history["val_loss"][-1], validated, rtol=1e-5)
        ends += [*model.weights, *model.optimizer.variables]
    return digest(ends)


class Stop(keras.callbacks.Callback):
    """Ends the training on rank 1 in the middle of an epoch, as TerminateOnNaN does."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1 and batch == 1:
            self.model.stop_training = True


def one_rank_decides_for_all() -> str:
    """Each rank by itself sees another loss, and nothing averages them."""
    model = shared_model()
    fit(model, hvd.rank(), epochs=1)
    Traced.calls = 0
    fit(model, hvd.rank(), epochs=3, callbacks=[Stop()])
    assert int(model.optimizer.iterations) == 2 * STEPS
    x, y = data()
    held = (x[0, 0], y[0, 0] * (-1) ** hvd.rank() + hvd.rank())
    history = fit(
        model,
        hvd.rank(),
        epochs=12,
        validation_data=held,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=0.02),
            keras.callbacks.EarlyStopping(patience=3, min_delta=0.02, restore_best_weights=True),
        ],
    )
    lengths = allgather_object(len(history.history["loss"]))
    assert lengths == [lengths[0]] * hvd.size()
    assert lengths[0] < 12
    if keras.backend.backend() != "torch":
        assert Traced.calls <= 1, Traced.calls  # that of the validation
    return digest([*model.weights, *model.optimizer.variables])


def backups_are_restored_on_all_ranks() -> str:
    whole = shared_model()
    fit(whole, hvd.rank(), epochs=4)
    want = [keras.ops.convert_to_numpy(weight) for weight in whole.weights]

    def backup() -> Any:
        return hvd.callbacks.RankZero(keras.callbacks.BackupAndRestore("backup"))

    with raising(Interrupted):
        fit(shared_model(), hvd.rank(), epochs=4, callbacks=[backup(), Interrupt()])
    model = shared_model()
    if hvd.rank() != 0:  # which has no part in what is restored
        model.optimizer.learning_rate = 0.0
    assert fit(model, hvd.rank(), epochs=4, callbacks=[backup(), *start()]).epoch == [2, 3]
    assert_close(model.weights, want, rtol=1e-6)
    if hvd.rank() == 0:  # which alone writes and removes it
        assert not Path("backup").exists()
    ends = [keras.ops.convert_to_numpy(v) for v in training_state(model)]

    def of_batches(model: Any) -> Any:
        kept = hvd.callbacks.RankZero(keras.callbacks.BackupAndRestore("backup", save_freq=1))
        kept.set_model(model)
        kept.on_train_begin()
        return kept

    of_batches(model).on_train_batch_end(1)
    model = shared_model()
    of_batches(model).on_train_end()
    assert_close(training_state(model), ends, rtol=0)
    return digest(training_state(model))


def files_of_one_rank() -> None:
    """Written under names that hold the rank, so that those of other ranks would be seen."""
    rank, model = hvd.rank(), shared_model()
    made = [
        keras.callbacks.CSVLogger(f"log-{rank}.csv"),
        keras.callbacks.ModelCheckpoint(f"{rank}.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(f"{rank}.keras", save_best_only=True, monitor="loss"),
    ]
    board = keras.backend.backend() == "tensorflow" and importlib.util.find_spec("tensorboard")
    if board:
        made.append(keras.callbacks.TensorBoard(f"board-{rank}"))
    made.append(keras.callbacks.ProgbarLogger())
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=f"best-{rank}.keras")
    # Whose weights every rank has to get, though others know nothing of it.
    made.append(keras.callbacks.EarlyStopping("loss", restore_best_weights=True))
    average = hvd.callbacks.MetricAverageCallback()
    fit(model, rank, callbacks=[average, best, *map(hvd.callbacks.RankZero, made)])
    names = {path.name for path in Path().glob(f"*{rank}*")}
    want = {f"log-{rank}.csv", f"{rank}.weights.h5", f"{rank}.keras", f"best-{rank}.keras"}
    want |= {f"board-{rank}"} if board else set()
    if rank == 0:
        assert want <= names, names
        assert len(Path("log-0.csv").read_text().splitlines()) == 1 + 2
        again = shared_model()
        again.load_weights("0.weights.h5")
        assert_close(again.weights, model_of("best-0.keras").weights)
    else:
        assert not want & names, names


def model_of(path: str) -> Any:
    return keras.saving.load_model(path, custom_objects={"Traced": Traced})


def what_cannot_work_is_refused_on_all_ranks() -> None:
    rank, size, model = hvd.rank(), hvd.size(), shared_model()
    average = hvd.callbacks.MetricAverageCallback()
    stopping = keras.callbacks.EarlyStopping("loss")
    with raising(ValueError, text="EarlyStopping comes before MetricAverageCallback"):
        fit(model, rank, callbacks=[average, stopping][:: -1 if rank == 1 else 1])
    with raising(ValueError, text="use RankZero(BackupAndRestore(...))"):
        fit(model, rank, callbacks=[keras.callbacks.BackupAndRestore("own")])
    with raising(MismatchError, text=f"[rank 1/{size}] fit: callbacks []"):
        fit(model, rank, callbacks=[average][: 0 if rank == 1 else 1])
    with raising(MismatchError, text=f"[rank 1/{size}] fit: epochs 0 to 3, but rank 0 has 0 to 2"):
        fit(model, rank, epochs=3 if rank == 1 else 2)
    other = keras.Sequential([keras.Input([3]), keras.layers.Dense(2 + min(rank, 1))])
    other.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with raising(MismatchError, text="kernel has shape (3, 3) of float32, but rank 0's"):
        other.fit(np.zeros([4, 3]), np.zeros([4, 1]), verbose=0)
    partial = dense_model(seed=5)
    local = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=partial.layers[0]
    )
    partial.compile(local, loss="mse")
    with raising(UnsupportedError, text="ranks did"):
        partial.fit(Batches(batches(UNEVEN, rank)), verbose=0)


class Halves(keras.Sequential):
    """Has a step of its own, and on TensorFlow and PyTorch an optimizer for each layer."""

    def compile(self, first: Any, second: Any) -> None:
        super().compile(optimizer=first, loss="mse")
        self.others = [second]

    def train_step(self, *given: Any) -> Any:
        *state, (x, y) = given
        if keras.backend.backend() == "jax":
            return self.step_of_jax(state[0], x, y)
        if keras.backend.backend() == "torch":
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x))
            loss.backward()
            gradients = [weight.value.grad for weight in self.trainable_weights]
        else:
            with importlib.import_module("tensorflow").GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x))
            gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients[:2], self.trainable_weights[:2])
        self.others[0].apply(gradients[2:], self.trainable_weights[2:])
        return {"loss": loss}

    def step_of_jax(self, state: Any, x: Any, y: Any) -> Any:
        import jax

        trainable, others, of_optimizer, of_metrics = state

        def loss_of(trainable: Any) -> Any:
            y_pred, _ = self.stateless_call(trainable, others, x)
            return self.compute_loss(y=y, y_pred=y_pred)

        gradients = jax.grad(loss_of)(trainable)
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, gradients, trainable)
        return {}, (trainable, others, of_optimizer, of_metrics)


def steps_of_ones_own() -> str:
    """With samples counted, and data that end early, as in Keras's own step."""
    backend = keras.backend.backend()
    keras.utils.set_random_seed(5)
    model = Halves([keras.Input([3]), Traced(7, activation="tanh"), keras.layers.Dense(2)])
    rates = (0.1, 0.1 if backend == "jax" else 0.05)
    optimizers = [keras.optimizers.SGD(rate, momentum=0.9) for rate in rates]
    model.compile(*map(hvd.DistributedOptimizer, optimizers))
    weights = [np.array(weight, np.float64) for weight in model.get_weights()]
    Traced.calls = 0
    model.fit(Batches(batches(UNEVEN, hvd.rank())), shuffle=False, verbose=0, callbacks=start())
    by_formula(weights, of_all_ranks(UNEVEN), rates)
    assert_close(model.weights, weights)
    if backend != "torch":
        assert 0 < Traced.calls <= len(set(UNEVEN[hvd.rank()])) + 1, Traced.calls
    return digest([*model.weights, *model.optimizer.variables, *model.others[0].variables])


def statistics_are_averaged() -> str:
    """Those that BatchNormalization counts, at the end of an epoch."""
    model = keras.Sequential([keras.Input([3]), keras.layers.BatchNormalization(momentum=0.5)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    x = np.random.default_rng(0).normal(size=(hvd.size(), ROWS, 3)).astype(np.float32)
    model.fit(x[hvd.rank()], x[hvd.rank()], batch_size=ROWS, verbose=0)
    layer = model.layers[0]
    want = [0.5 * x.mean(1).mean(0), 0.5 + 0.5 * x.var(1).mean(0)]
    assert_close([layer.moving_mean, layer.moving_variance], want)
    return digest(model.weights)
