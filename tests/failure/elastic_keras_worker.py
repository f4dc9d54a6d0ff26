"""Scripts in the shape of Horovod's elastic examples for Keras and TensorFlow.

Ranks kill themselves in one of them; all go on with the same functions, traced before. All ranks
have the same data, so that the weights at the end are those of one rank alone.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from raising import raising
from ranks import report

import hvdtrain.keras as hvd
from hvdtrain.errors import UnsupportedError

EPOCHS, STEPS, BATCH = 3, 4, 2
ROOM = np.random.default_rng(1)
X = ROOM.standard_normal([EPOCHS * STEPS * BATCH, 6]).astype("float32")
Y = ROOM.standard_normal([EPOCHS * STEPS * BATCH, 1]).astype("float32")
# More than is copied into a bucket rather than lent.
WIDTH = 4096


class Kill:
    """Ends this rank in a step, once all others have begun it: else the step before may break."""

    def __init__(self, name: str, here: bool) -> None:
        self.here = here
        self._files = [Path(f"{name} {rank}") for rank in range(hvd.size())]
        self._own = self._files[hvd.rank()]

    def __call__(self, epoch: int, batch: int) -> None:
        if (epoch, batch) != (1, 2):
            return
        self._own.touch()
        if self.here:
            while not all(file.exists() for file in self._files):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def model_of(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(1)]
    )


def batches(epoch: int) -> list[tuple[Any, Any]]:
    first = epoch * STEPS * BATCH
    starts = range(first, first + STEPS * BATCH, BATCH)
    return [(X[start : start + BATCH], Y[start : start + BATCH]) for start in starts]


def alone() -> list[Any]:
    model = model_of(0)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
    for epoch in range(EPOCHS):
        for x, y in batches(epoch):
            model.train_on_batch(x, y)
    return [np.array(keras.ops.convert_to_numpy(each)) for each in model.weights]


class Killing(keras.callbacks.Callback):
    def __init__(self, kill: Kill, state: Any, seen: list[Any]) -> None:
        super().__init__()
        self.kill, self.state, self.seen = kill, state, seen

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.state.epoch, self.state.batch))
        self.kill(self.state.epoch, self.state.batch)


def fitting(kill: Kill) -> tuple[Any, dict[str, Any]]:
    model = model_of(hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5)), "mse")
    state: Any = hvd.elastic.KerasState(model, batch=0, epoch=0)
    seen: list[Any] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    def samples() -> Any:
        for epoch in range(state.epoch, EPOCHS):
            yield from batches(epoch)[state.batch if epoch == state.epoch else 0 :]

    @hvd.elastic.run
    def train(state: Any) -> None:
        model.fit(
            samples(),
            steps_per_epoch=STEPS,
            epochs=EPOCHS - state.epoch,
            verbose=0,
            callbacks=[
                Killing(kill, state, seen),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ],
        )

    train(state)
    assert (state.epoch, state.batch) == (EPOCHS, 0)
    return model, {"seen": seen, "resets": resets}


def state_with(**how: Any) -> Any:
    model = model_of(0)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), **how), "mse")
    return hvd.elastic.KerasState(model)


def refuse_what_is_lost_with_a_rank() -> None:
    for exchange in ("nbit:bits=8", "powersgd:rank=1", "topk:ratio=0.1", "local:steps=2"):
        with raising(UnsupportedError, text="cannot continue without a rank with exchange "):
            state_with(exchange=exchange)
    with raising(
        UnsupportedError, text="sharded=True: with mpirun --with-ft ulfm the job continues"
    ):
        state_with(sharded=True)
    state_with(exchange="half:type=bf16")


def main(case: str, victims: list[int]) -> None:
    hvd.init()
    started = hvd.rank()
    refuse_what_is_lost_with_a_rank()
    cases: dict[str, Callable[[Kill], tuple[Any, dict[str, Any]]]] = {"fit": fitting}
    if keras.backend.backend() == "tensorflow":
        import elastic_tapes

        cases |= elastic_tapes.CASES
    expected, results = alone(), {}
    for name, run in cases.items():
        model, results[name] = run(Kill(name, name == case and started in victims))
        for weight, value in zip(model.weights, expected, strict=True):
            np.testing.assert_allclose(keras.ops.convert_to_numpy(weight), value, atol=1e-5)
    report(len(cases), {"size": hvd.size(), "rank": hvd.rank(), "results": results})


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
