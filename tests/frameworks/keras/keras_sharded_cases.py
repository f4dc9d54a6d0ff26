"""Optimizers of Keras whose work the ranks of a node share, against those of each rank alone."""

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras_optimizer_cases import Array, digest, gradients, mean_gradients
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.keras.backends.sharding import StateVariable

SHAPES = [(70, 3), (3,), (), (9, 40)]  # slices of 64 elements begin within variables
STEPS = 4
ON_JAX = keras.backend.backend() == "jax"
# Of weights and state after some steps, whose size is about 1.
BOUND = 2e-6


def new_variables() -> list[Any]:
    random = np.random.default_rng(0)
    return [
        keras.Variable(random.normal(size=shape).astype(np.float32), name=name)
        for name, shape in zip(["kernel", "bias", "scale", "table"], SHAPES, strict=True)
    ]


def assert_near(mine: Any, theirs: Any) -> None:
    for own, want in zip(mine, theirs, strict=True):
        own, want = np.asarray(keras.ops.convert_to_numpy(own)), keras.ops.convert_to_numpy(want)
        np.testing.assert_allclose(own, want, rtol=0, atol=BOUND)


class Both:
    """An optimizer whose work ranks share, and the same on one rank, on variables of their own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.shared, self.alone = hvd.DistributedOptimizer(make(), sharded=True), make()
        self.mine, self.theirs = new_variables(), new_variables()

    def step(self, step: int, apply: Callable[..., None] | None = None) -> None:
        own = map(keras.ops.convert_to_tensor, gradients(step, hvd.rank(), SHAPES))
        if apply is None:
            self.shared.apply(list(own), self.mine)
        else:
            apply(*own)
        means = [mean.astype(np.float32) for mean in mean_gradients(step, SHAPES)]
        self.alone.apply([*map(keras.ops.convert_to_tensor, means)], self.theirs)

    def compared(self) -> list[Any]:
        """Return all variables, which must be near those of one rank."""
        assert_near(self.mine, self.theirs)
        assert_near(self.shared.variables, self.alone.variables)
        return [*self.mine, *self.shared.variables]


def decaying(rate: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(rate, 2, 0.5)


def without_bias(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


MAKES: dict[str, Callable[[], Any]] = {
    "plain": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(decaying(0.1), momentum=0.9, global_clipnorm=2.0),
    "nesterov": lambda: without_bias(
        keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    ),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True, clipvalue=0.5),
    "adamw": lambda: keras.optimizers.AdamW(decaying(0.1), weight_decay=0.1),
    "muon": lambda: without_bias(keras.optimizers.Muon(0.02, adam_lr_ratio=2.0, weight_decay=0.1)),
    "muon of Adam": lambda: keras.optimizers.Muon(
        0.02, exclude_layers=["table"], nesterov=False, global_clipnorm=2.0
    ),
}


def shared_steps_are_those_of_one_rank() -> str:
    ends = []
    for name, make in MAKES.items():
        both = Both(make)
        assert both.shared.sharded == (hvd.size() > 1)
        for step in range(STEPS):
            both.step(step)
        kept = [v for v in both.shared.variables if isinstance(v, StateVariable)]
        quantities = {"plain": 0, "momentum": 4, "nesterov": 4, "adam": 12, "adamw": 8}
        assert len(kept) == (quantities | {"muon": 6, "muon of Adam": 7})[name]
        ends += both.compared()
    return digest(ends)


def kept_tensors_stay_what_they_are() -> str:
    """Weights that rank 0 still refers to are not overwritten by those of later steps."""
    both = Both(lambda: keras.optimizers.SGD(0.1))
    both.shared.build(both.mine)
    kept: list[tuple[Any, Array]] = []

    def apply(*given: Any) -> None:
        both.shared.apply(list(given), both.mine)

    on_tensorflow = keras.backend.backend() == "tensorflow"
    if on_tensorflow:  # only in graphs are results not copied there
        apply = importlib.import_module("tensorflow").function(apply, autograph=False)
    for step in range(STEPS):
        both.step(step, apply)
        if hvd.rank() == 0 and on_tensorflow:
            kept += [(v.value.read_value(), np.array(v)) for v in both.mine]
    for tensor, value in kept:
        np.testing.assert_array_equal(np.array(tensor), value)
    return digest(both.compared())


def ranks_without_the_same_gradients() -> str:
    both = Both(lambda: keras.optimizers.SGD(0.1))
    for step in range(2):
        if hvd.size() > 1:
            own: list[Array | None] = [*gradients(step, hvd.rank(), SHAPES)]
            own[hvd.rank()] = None
            with raising(MismatchError, text="without gradients of variables 1, which have to be"):
                both.shared.apply(own, both.mine)
        both.step(step)
    return digest(both.compared())


def model_of(sharded: bool) -> Any:
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [
            keras.Input([2], dtype="int32"),
            keras.layers.Embedding(11, 16),
            keras.layers.Flatten(),
            keras.layers.Dense(7, activation="tanh"),
            keras.layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(0.5)),
        ]
    )
    # Keras squares the rows of sparse gradients one by one, those of equal indices, too.
    optimizer = keras.optimizers.Muon(0.05)  # which steps on some variables as Adam
    model.compile(
        hvd.DistributedOptimizer(optimizer, sparse_as_dense=not sharded, sharded=sharded), "mse"
    )
    return model


def fit(model: Any) -> None:
    random = np.random.default_rng(hvd.rank())
    x, y = random.integers(11, size=(12, 2)), random.normal(size=(12, 1)).astype(np.float32)
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)


def one_rank_saves_and_all_go_on() -> str:
    models = [model_of(True), model_of(False)]
    for model in models:
        fit(model)
    shared, alone = models
    assert_near(shared.weights, alone.weights)
    if hvd.rank() == 0:
        shared.save("shared.keras")
    allgather_object(None, "saved")
    loaded = keras.saving.load_model("shared.keras")  # without hvdtrain
    assert_near(loaded.optimizer.variables, alone.optimizer.variables)
    loaded.compile(hvd.DistributedOptimizer(loaded.optimizer, sharded=True), "mse")
    for model in (shared, loaded, alone):
        fit(model)
    assert digest(loaded.weights) == digest(shared.weights)
    assert_near(shared.weights, alone.weights)
    return digest([*loaded.weights, *loaded.optimizer.variables])


def velocities_are_scaled_when_no_rank_reads_them() -> str:
    """As by a callback that corrects them, while another rank is still saving the last step."""
    both = Both(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    for step in range(2):
        both.step(step)
        velocities = list(both.shared.momentums)
        before = [np.array(velocity) for velocity in velocities]
        for turn in range(hvd.size()):  # the last rank first
            scaled = hvd.rank() >= hvd.size() - turn
            for velocity, value in zip(velocities, before, strict=True):
                np.testing.assert_array_equal(velocity, value * np.float32(0.5 if scaled else 1))
            allgather_object(None, "all have read")
            if hvd.rank() == hvd.size() - 1 - turn:
                for velocity in velocities:
                    scale(velocity)
            allgather_object(None, "one has scaled")
        for velocity in both.alone.momentums:
            scale(velocity)
    both.step(2)
    return digest(both.compared())


def scale(velocity: Any) -> None:
    if isinstance(velocity, StateVariable):
        velocity.scale(0.5)
    else:
        velocity.assign(velocity * 0.5)


def what_cannot_be_shared_is_refused() -> None:
    kinds = keras.optimizers
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (kinds.Lamb(), {}, "got Lamb: use sharded=False"),
        (kinds.SGD(clipnorm=1.0), {}, "SGD with clipnorm cannot be shared"),
        (kinds.Adam(use_ema=True), {}, "Adam with use_ema cannot be shared"),
        (kinds.Adam(), {"exchange": "half:type=bf16"}, "not exchange 'half"),
        (kinds.LossScaleOptimizer(kinds.SGD()), {}, "a LossScaleOptimizer, which compile"),
    ]
    for optimizer, options, text in refused:
        reason = "sharded=True: on Keras's backend jax" if ON_JAX else text
        with raising(UnsupportedError, text=reason):
            hvd.DistributedOptimizer(optimizer, sharded=True, **options)
    if not ON_JAX:
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.dtype_policy = keras.DTypePolicy("mixed_float16")
        with raising(UnsupportedError, text="a LossScaleOptimizer, which compile"):
            model.compile(hvd.DistributedOptimizer(kinds.SGD(), sharded=True), "mse")
        with raising(ValueError, text="backward_passes_per_step=1"):
            hvd.DistributedOptimizer(kinds.SGD(), sharded=True, backward_passes_per_step=2)
