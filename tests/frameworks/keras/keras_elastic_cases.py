"""horovod.keras.elastic on ranks that stay."""

from typing import Any

import keras
import numpy as np
from keras_fit_cases import data, dense_model
from raising import raising

import hvdtrain.keras as hvd

STEPS = 3


class Commits:
    def __init__(self, state: Any) -> None:
        self.seen: list[tuple[int, int]] = []
        self._state, self._commit = state, state.commit
        state.commit = self

    def __call__(self) -> None:
        self.seen.append((self._state.epoch, self._state.batch))
        self._commit()


def own_state(**values: Any) -> Any:
    model = dense_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), "mse")
    return hvd.elastic.KerasState(model, **values)


def fit_of(state: Any, epochs: int, *callbacks: Any) -> list[tuple[int, int]]:
    x, y = (array.reshape(-1, array.shape[-1])[: 2 * STEPS] for array in data())
    commits = Commits(state)
    updates = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        *callbacks,
    ]
    state.model.fit(x, y, batch_size=2, epochs=epochs, verbose=0, callbacks=updates)
    return commits.seen


def weights_and_momenta_go_back() -> None:
    state = own_state(epoch=hvd.rank(), names=[])
    variables = [*state.model.weights, *state.optimizer.variables]

    def values() -> list[Any]:
        return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]

    state.sync()
    began = values()
    assert (state.epoch, state.optimizer is state.model.optimizer) == (0, True)
    state.names.append("one")
    state.model.train_on_batch(*(array.reshape(-1, array.shape[-1])[:2] for array in data()))
    assert any((one != two).any() for one, two in zip(values(), began, strict=True))
    state.restore()
    assert all((one == two).all() for one, two in zip(values(), began, strict=True))
    assert state.names == []
    with raising(ValueError, text="optimizer"):
        hvd.elastic.KerasState(dense_model(seed=0))
    with raising(ValueError, text="built"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def fit_goes_on_in_the_middle_of_an_epoch() -> None:
    state = own_state(epoch=4, batch=1)
    state.sync()
    # One batch of the epoch is done, and the next epoch is a whole one.
    seen = fit_of(state, 2, hvd.elastic.CommitStateCallback(state))
    assert seen == [(4, 2), (4, 3), (5, 0), (5, 1), (5, 2), (5, 3), (6, 0)], seen


def commits_are_as_rare_as_asked() -> None:
    state = own_state(epoch=0, batch=0)
    state.sync()
    seen = fit_of(state, 2, hvd.elastic.CommitStateCallback(state, batches_per_commit=2))
    assert seen == [(0, 2), (1, 0), (1, 2), (2, 0)], seen
    with raising(ValueError, text="batches_per_commit"):
        hvd.elastic.CommitStateCallback(state, 0)
