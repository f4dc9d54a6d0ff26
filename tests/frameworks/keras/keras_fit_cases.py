"""`fit` with hvdtrain.keras: N ranks against one with the whole batch, traces and files."""

import functools
import importlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_formula import by_formula
from keras_optimizer_cases import assert_close, digest
from page_blocks import ROOT, blocks
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.errors import UnsupportedError
from hvdtrain.keras.backends.distributed import DistributedMixin, training_state

# What one rank gives is compiled on JAX alone, where to run each operation takes longer.
EAGERLY = keras.backend.backend() != "jax"
ROWS = 4  # of each rank in a step
STEPS = 6  # of an epoch
EPOCHS = 2


class Traced(keras.layers.Dense):
    """Counts how often Python runs through it."""

    calls = 0

    def call(self, inputs: Any, training: Any = None) -> Any:
        type(self).calls += 1
        return super().call(inputs, training=training)


class Batches(keras.utils.PyDataset):
    """Gives these batches; `fit` knows how many they are."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self._given = given

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: int) -> Any:
        return self._given[index]


class Interrupted(Exception):
    """What ends a training."""


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise Interrupted


def data(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(STEPS, hvd.size(), ROWS, 3)).astype(np.float32)
    return x, np.tanh(x @ random.normal(size=(3, 2))).astype(np.float32)


def dense_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input([3]), Traced(7, activation="tanh"), keras.layers.Dense(2)]
    return keras.Sequential(layers)


@functools.cache
def _shared() -> tuple[Any, list[Any]]:
    model = dense_model(seed=5)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    return model, [keras.ops.convert_to_numpy(variable) for variable in training_state(model)]


def shared_model() -> Any:
    """Return a model as it was at first, but for its traces, which many cases share."""
    model, state = _shared()
    for variable, value in zip(training_state(model), state, strict=True):
        variable.assign(value)
    model._initial_epoch = None
    return model


def fit(model: Any, rank: int | None, arrays: Any = None, **how: Any) -> Any:
    parts = data() if arrays is None else arrays
    if rank is not None:
        parts = [array[:, rank] for array in parts]
    x, y = (array.reshape(-1, array.shape[-1]) for array in parts)
    batch = len(x) // STEPS
    options = {"shuffle": False, "verbose": 0, "epochs": EPOCHS, **how}
    calls = Traced.calls
    history = model.fit(x, y, batch_size=batch, **options)
    if keras.backend.backend() != "torch" and not model.run_eagerly:
        # At most of a step and of one with shapes left open, and the same for the validation.
        assert Traced.calls - calls <= 4, "steps are not compiled"
    return history


def is_distributed(optimizer: Any) -> bool:
    return isinstance(optimizer, DistributedMixin)


def start() -> list[Any]:
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]


OPTIMIZERS = [
    lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=1.0),
]


def for_biases_and_kernels(variable: Any) -> Any:
    return OPTIMIZERS["bias" in variable.path]()


if hasattr(keras.optimizers, "MultiOptimizer"):
    OPTIMIZERS += [
        lambda: keras.optimizers.MultiOptimizer(for_biases_and_kernels),
        lambda: keras.optimizers.LossScaleOptimizer(OPTIMIZERS[2](), initial_scale=4.0),
    ]


def ranks_together_give_what_one_gives() -> str:
    """What SGD gives is known by a formula, what Adam gives by Keras on one rank."""
    ends = []
    for make in OPTIMIZERS:
        model = dense_model(seed=5)
        plain = make()
        if isinstance(plain, keras.optimizers.SGD):
            want = [np.array(weight, np.float64) for weight in model.get_weights()]
            flat = [array.reshape(STEPS, -1, array.shape[-1]) for array in data()]
            steps = list(zip(*flat, strict=True))
            by_formula(want, EPOCHS * steps, momentum=plain.momentum, nesterov=plain.nesterov)
        else:
            model.compile(plain, loss="mse", run_eagerly=EAGERLY)
            fit(model, None)
            want = model.get_weights()
        Traced.calls = 0
        model = dense_model(seed=5 + hvd.rank())  # rank 0's counts
        model.compile(hvd.DistributedOptimizer(make()), loss="mse")
        fit(model, hvd.rank(), callbacks=start())
        if keras.backend.backend() != "torch":  # which never traces
            assert 0 < Traced.calls < STEPS, Traced.calls
        assert_close(model.weights, want)
        ends += [*model.weights, *model.optimizer.variables]
    return digest(ends)


def ranks_agree_on_what_is_finite() -> str:
    """An infinite gradient on one rank: all skip the step, and halve the scale."""
    x, y = data()
    x[0, hvd.size() - 1] = 1e4  # beyond what float16 holds after the loss is scaled
    ends, policy = [], keras.config.dtype_policy()
    for explicit in (False, True):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = dense_model(seed=5)
        finally:
            keras.config.set_dtype_policy(policy)
        optimizer = keras.optimizers.SGD(0.01)
        if explicit:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
        scaling: Any = model.optimizer
        assert isinstance(scaling, keras.optimizers.LossScaleOptimizer)
        assert is_distributed(scaling)
        assert not is_distributed(scaling.inner_optimizer)
        fit(model, hvd.rank(), (x * 10, y), epochs=1)
        assert float(keras.ops.convert_to_numpy(scaling.dynamic_scale)) < scaling.initial_scale
        assert 0 < int(scaling.iterations) < STEPS
        ends += [*model.weights, *scaling.variables]
        assert all(np.isfinite(keras.ops.convert_to_numpy(w)).all() for w in model.weights)
    model.compile(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(OPTIMIZERS[0]())))
    assert is_distributed(model.optimizer)
    assert not is_distributed(model.optimizer.inner_optimizer)
    # Before init(), `model.compile(hvd.DistributedOptimizer(...))` calls Keras's own compile.
    compile_of_keras: Any = keras.Model.compile.__wrapped__
    compile_of_keras(model, hvd.DistributedOptimizer(OPTIMIZERS[0]()), loss="mse")
    assert not is_distributed(model.optimizer)
    fit(model, hvd.rank(), (x, y), epochs=1)
    assert is_distributed(model.optimizer)
    assert not is_distributed(model.optimizer.inner_optimizer)
    return digest(ends)


def models_that_fit_builds() -> str:
    """TensorFlow builds such a model in its first step only."""
    unbuilt = keras.Model()
    unbuilt.built = True  # as Keras has it, of a class without `build`
    unbuilt.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    (begin,) = start()
    begin.set_model(unbuilt)
    begin.on_train_begin()
    assert not unbuilt.optimizer.built
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    fit(model, hvd.rank(), epochs=1, callbacks=start())
    return digest([*model.weights, *model.optimizer.variables])


def a_process_group_of_torch_changes_nothing() -> str | None:
    """Keras 3.16 would reduce in it, too, in steps of local SGD and where one rank evaluates."""
    if keras.backend.backend() != "torch":
        return None
    distributed = importlib.import_module("torch.distributed")
    importlib.import_module("hvdtrain.torch.process_group")
    x, y = (
        array[: STEPS - hvd.rank(), hvd.rank()].reshape(-1, array.shape[-1]) for array in data()
    )
    ends = []
    for grouped in (False, True):
        model = dense_model(seed=5)
        if grouped:
            store = distributed.HashStore()
            distributed.init_process_group("hvdtrain", None, None, hvd.size(), hvd.rank(), store)
            model.predict(x, verbose=0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange="local:steps=2")
        model.compile(optimizer, loss="mse", metrics=["mae"], run_eagerly=True)
        model.fit(x, y, ROWS, verbose=0, shuffle=False, callbacks=start())
        alone = model.evaluate(x, y, verbose=0) if hvd.rank() == 0 else []
        ends.append((digest(model.weights), alone))
    distributed.destroy_process_group()
    assert ends[0] == ends[1]
    return ends[0][0]


class OwnSGD(keras.optimizers.SGD):
    """As users register theirs."""


def one_rank_evaluates_alone() -> None:
    """In fit and after it, as Keras does."""
    normalization = keras.layers.BatchNormalization
    if keras.backend.backend() == "tensorflow":
        normalization = importlib.import_module("hvdtrain.tensorflow").SyncBatchNormalization

    def make(kind: Any, optimizer: Any) -> Any:
        layers = [keras.Input([3]), kind(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(optimizer, loss="mse", metrics=["mae"], run_eagerly=EAGERLY)
        return model

    model = make(normalization, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    plain = make(keras.layers.BatchNormalization, "sgd")
    x, y = (array[0, hvd.rank()] for array in data())

    def evaluate(*_: Any) -> None:
        if hasattr(model, "jax_state_sync"):  # within fit, variables are not current
            model.jax_state_sync()
        plain.set_weights(model.get_weights())
        results = ([m.evaluate(x, y, verbose=0), m.predict(x, verbose=0)] for m in (model, plain))
        for own, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=1e-5)

    callbacks = [*start(), hvd.callbacks.MetricAverageCallback()]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=evaluate))
    model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks)
    if hvd.rank() == 0:
        evaluate()
    hvd.allreduce(np.zeros(1))  # which the others wait in


def saved_models() -> str:
    model = dense_model(seed=5)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    fit(model, hvd.rank(), epochs=1)
    path = Path(f"model-{hvd.rank()}.keras")
    model.save(path)
    saved = json.loads(zipfile.ZipFile(path).read("config.json"))
    assert saved["compile_config"]["optimizer"]["module"] == "keras.optimizers"
    known = {"Traced": Traced}
    plain = keras.saving.load_model(path, custom_objects=known)
    assert isinstance(plain.optimizer, keras.optimizers.Adam)
    assert not is_distributed(plain.optimizer)
    again = hvd.load_model(path, custom_objects=known)
    assert is_distributed(again.optimizer)
    assert not again.jit_compile or keras.backend.backend() == "jax"
    assert_close(again.optimizer.variables, model.optimizer.variables, rtol=0)
    for each in (model, again):
        fit(each, hvd.rank(), epochs=1)
    assert_close(again.weights, model.weights)
    own = keras.saving.register_keras_serializable("tests")(OwnSGD)
    saved = keras.saving.serialize_keras_object(hvd.DistributedOptimizer(own(0.5)))
    assert type(keras.saving.deserialize_keras_object(saved)) is own
    with raising(ValueError, text="legacy_opts"):
        hvd.load_model(path, legacy_opts=True)
    return digest(again.weights)


def what_xla_is_to_compile() -> None:
    model = dense_model(seed=5)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if keras.backend.backend() == "tensorflow":
        with raising(UnsupportedError, text="leave out jit_compile"):
            model.compile(optimizer, loss="mse", jit_compile=True)
        model.compile(optimizer, loss="mse")
        assert model.jit_compile is False
        model.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=True)
        assert model.jit_compile is True  # what is not ours stays as it was
    else:
        model.compile(optimizer, loss="mse")
        assert model.jit_compile is (keras.backend.backend() == "jax")


def the_documented_fit() -> str | None:
    # To import scikit-learn takes longer than all the rest, and JAX compiles for long.
    if hvd.size() > 2 or keras.backend.backend() == "jax":
        return None
    names: dict[str, Any] = {}
    exec(blocks(ROOT / "README.md", "python")[-1], names)
    history = names["history"].history
    assert history["accuracy"][-1] > 0.9
    return digest(names["model"].weights) + str(history)


def horovods_names() -> None:
    assert importlib.import_module("horovod.keras") is hvd
    assert importlib.import_module("horovod.keras.callbacks") is hvd.callbacks
    if keras.backend.backend() == "tensorflow":
        assert importlib.import_module("horovod.tensorflow.keras") is hvd
