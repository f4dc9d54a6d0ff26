"""Steps of Keras's optimizers on TensorFlow, taken in fewer passes, with the bits of Keras."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras_optimizer_cases import Array, digest, gradients

import hvdtrain.keras as hvd

kinds = keras.optimizers
SHAPES = [(70, 3), (3,), (), (9, 40)]
STEPS = 4
# What steps that are faster consist of, in graphs.
FASTER = "ResourceApply"


def decaying(rate: float) -> Any:
    return kinds.schedules.ExponentialDecay(rate, 2, 0.5)


class Own(keras.optimizers.SGD):
    """An optimizer with a step of its own."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * 2, variable, learning_rate)


TAKEN: dict[str, Callable[[], Any]] = {
    "plain": lambda: kinds.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "momentum": lambda: kinds.SGD(decaying(0.1), momentum=0.9, global_clipnorm=2.0),
    "nesterov": lambda: kinds.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: kinds.Adam(0.1, clipvalue=0.5),
    "amsgrad": lambda: kinds.Adam(0.1, beta_1=0.7, amsgrad=True, gradient_accumulation_steps=2),
    "adamw": lambda: kinds.AdamW(decaying(0.1), weight_decay=0.1, clipnorm=1.0),
}
LEFT: dict[str, Callable[[], Any]] = {
    "rmsprop": lambda: kinds.RMSprop(0.1),
    "own": lambda: Own(0.1, momentum=0.9),
    "scaled": lambda: kinds.LossScaleOptimizer(kinds.Adam(0.1), initial_scale=4.0),
    "beta in a tensor": lambda: kinds.Adam(0.1, beta_1=keras.ops.convert_to_tensor(0.5)),
}


def distributed(make: Callable[[], Any], steps: str, **options: Any) -> Any:
    with mock.patch.dict(os.environ, {"HVDTRAIN_KERAS_STEPS": steps}):
        return hvd.DistributedOptimizer(make(), op=hvd.Sum, **options)


def ends_of(optimizer: Any, dtype: str, graph: bool, summed: bool) -> tuple[list[Any], bool]:
    """Return variables after some steps, and whether these are faster ones."""
    tf = importlib.import_module("tensorflow")
    random = np.random.default_rng(0)
    variables = [keras.Variable(random.normal(size=shape), dtype=dtype) for shape in SHAPES]
    optimizer.build(variables)

    def apply(*given: Any) -> None:
        optimizer.apply([*given[:2], None, *given[3:]], variables)  # None on all ranks

    step: Any = tf.function(apply, autograph=False) if graph else apply
    for number in range(STEPS):
        # Integers, whose sum over the ranks is exact.
        ranks = range(hvd.size()) if summed else [hvd.rank()]
        found = zip(*(gradients(number, rank, SHAPES) for rank in ranks), strict=True)
        total: list[Array] = [np.sum([np.round(9 * part) for part in of], 0) for of in found]
        given = [tf.constant(each, dtype) for each in total]
        step(*given)
        if number == 1:  # as a program may
            optimizer.variables[-1].assign(optimizer.variables[-1] * 0.5)
    faster = graph and FASTER in str(step.get_concrete_function(*given).graph.as_graph_def())
    return [*variables, *optimizer.variables], faster


def steps_have_the_bits_of_keras() -> str:
    ends = []
    for name, make in (TAKEN | LEFT).items():
        for dtype, graph in (("float32", True), ("float32", False), ("float64", True)):
            on, faster = ends_of(distributed(make, "1"), dtype, graph, summed=False)
            alone, _ = ends_of(make(), dtype, graph, summed=True)
            assert faster == (graph and name in TAKEN), (name, dtype)
            assert digest(on) == digest(alone), (name, dtype, graph)
            ends += on
        off, faster = ends_of(distributed(make, "0"), dtype, graph, summed=False)
        assert digest(off) == digest(on), name
        assert not faster
    return digest(ends)


def keras_takes_the_steps_of_what_does_not_suit() -> None:
    tf = importlib.import_module("tensorflow")
    indices = tf.constant([1, hvd.rank()])
    rows = tf.IndexedSlices(tf.ones([2, 2]), indices, tf.constant([9, 2]))
    given = {"float32": rows, "bfloat16": tf.ones([9, 2], tf.bfloat16)}
    for dtype, gradient in given.items():
        ends = []
        for steps in "10":
            variable = keras.Variable(np.ones([9, 2]), dtype=dtype)
            optimizer = distributed(partial(kinds.Adam, 0.1), steps)
            optimizer.build([variable])
            step = tf.function(partial(optimizer.apply, [gradient], [variable]), autograph=False)
            step()
            assert FASTER not in str(step.get_concrete_function().graph.as_graph_def())
            ends.append(digest([keras.ops.cast(variable, "float32")]))
        assert ends[0] == ends[1]


def a_function_that_is_traced_again_has_another_optimizer() -> str:
    tf = importlib.import_module("tensorflow")
    makes = [partial(kinds.Adam, 0.1, beta_1=beta) for beta in (0.3, 0.4)]
    optimizers = [distributed(make, "1") for make in makes]
    variables = [keras.Variable(np.ones([9, 2]), name=f"traced{n}") for n in range(2)]
    for optimizer, variable in zip(optimizers, variables, strict=True):
        optimizer.build([variable])

    def apply(number: int, gradient: Any) -> None:  # may make no variables when traced again
        optimizers[number].apply([gradient], [variables[number]])

    step = tf.function(apply, autograph=False)
    for number in range(2):
        step(number, tf.ones([9, 2]))
        assert step.experimental_get_tracing_count() == number + 1
    return digest(variables)


def small_model(steps: str) -> Any:
    keras.utils.set_random_seed(4)
    inputs = keras.Input([4])
    frozen = keras.layers.Dense(6, trainable=False)
    hidden = keras.layers.Dense(7, activation="tanh")(frozen(inputs))
    bound = keras.constraints.MaxNorm(0.5)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_constraint=bound)(hidden))
    optimizer = distributed(partial(kinds.Adam, 0.01), steps)
    model.compile(optimizer, "mse", steps_per_execution=2)
    return model


def fits_saves_and_loads_are_the_same() -> str:
    """Also of models that are saved in between, where ranks have unequal numbers of steps."""
    ends, rank = [], hvd.rank()
    random = np.random.default_rng(rank)
    x, y = random.normal(size=(16 + 4 * rank, 4)), random.normal(size=(16 + 4 * rank, 1))

    def fit(model: Any) -> Any:
        model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
        return model

    for steps in "10":
        model, path = fit(small_model(steps)), f"steps{steps}.{rank}.keras"
        model.save(path)
        loaded = keras.saving.load_model(path)
        assert type(loaded.optimizer) is kinds.Adam
        loaded.compile(distributed(partial(getattr, loaded, "optimizer"), steps), "mse")
        ends += [digest([*m.weights, *m.optimizer.variables]) for m in map(fit, (model, loaded))]
    assert len(set(ends)) == 1, ends
    return ends[0]
