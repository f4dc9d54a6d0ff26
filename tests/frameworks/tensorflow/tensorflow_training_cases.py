"""Training with hvdtrain.tensorflow: N ranks against one with the whole batch."""

import functools
import hashlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from data_page import PAGE, check_keras_loop
from logged import WEIGHTS_DIFFER, logged
from raising import raising

import hvdtrain.tensorflow as hvd
from hvdtrain.core import context
from hvdtrain.errors import MismatchError

ROWS = 4  # of each rank in a step
STEPS = 3


def digest(variables: Any) -> str:
    data = b"".join(np.asarray(tf.convert_to_tensor(v)).tobytes() for v in variables)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    rows = STEPS * hvd.size() * ROWS
    x = random.normal(size=(rows, 3)).astype(np.float32)
    return x, np.tanh(x @ random.normal(size=(3, 2))).astype(np.float32)


def batch(step: int, rank: int | None) -> tuple[Any, Any]:
    x, y = data()
    start = step * hvd.size() * ROWS + (rank or 0) * ROWS
    count = ROWS if rank is not None else ROWS * hvd.size()
    return tf.constant(x[start : start + count]), tf.constant(y[start : start + count])


def initial(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    shapes = [(3, 7), (7,), (7, 2), (2,)]  # 28 bytes are no multiple of what TensorFlow wants
    return [random.normal(size=shape).astype(np.float32) * np.float32(0.5) for shape in shapes]


def loss_of(variables: Any, x: Any, y: Any) -> Any:
    hidden = tf.tanh(x @ variables[0] + variables[1])
    return tf.reduce_mean((hidden @ variables[2] + variables[3] - y) ** 2)


def train(
    optimizer: Any,
    rank: int | None,
    wrap: Callable[[Any], Any] = lambda tape: tape,
    compiled: bool = True,
    passes: int = 1,
) -> list[tf.Variable]:
    variables = [tf.Variable(array) for array in initial(seed=5 + (rank or 0))]
    if rank is not None:
        hvd.broadcast_variables(variables, root_rank=0)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        gradients = wrap(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(step, autograph=False) if compiled else step
    for number in range(STEPS * passes):
        run(*batch(number // passes, rank))
    return variables


@functools.cache
def of_one_rank(make: Callable[[], Any]) -> list[Any]:
    return [variable.numpy() for variable in train(make(), None, compiled=False)]


def assert_close(variables: Any, want: Any) -> None:
    for mine, theirs in zip(variables, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


OPTIMIZERS: list[Callable[[], Any]] = [
    lambda: tf.keras.optimizers.SGD(0.1),
    lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    lambda: tf.keras.optimizers.Adam(0.01, epsilon=1e-3),
]


def tapes_give_what_one_rank_gives() -> str:
    ends = []
    for make in OPTIMIZERS:
        want = of_one_rank(make)
        for compiled in (True, False):
            ends.append(train(make(), hvd.rank(), hvd.DistributedGradientTape, compiled))
            assert_close(ends[-1], want)
    return "-".join(map(digest, ends))


def keras_optimizers_give_what_one_rank_gives() -> str:
    ends = []
    for make in OPTIMIZERS[1:]:
        want = of_one_rank(make)
        optimizer = hvd.DistributedOptimizer(make())
        ends.append(train(optimizer, hvd.rank()))
        assert_close(ends[-1], want)
        assert int(optimizer.iterations) == STEPS
        twice = hvd.DistributedOptimizer(
            make(), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        end = train(twice, hvd.rank(), passes=2)
        assert int(twice.iterations) == 2 * STEPS  # which is what Adam corrects its bias by
        if not isinstance(twice, tf.keras.optimizers.Adam):
            assert_close(end, want)
        with raising(ValueError, text="already"):
            hvd.DistributedOptimizer(optimizer)
    return "-".join(map(digest, ends))


def weights_that_differ_are_told() -> None:
    """Once for each variable, also of equal shapes."""
    others = hvd.size() > 1 and hvd.rank() == 0
    for number, (compiled, seed) in enumerate(itertools.product((True, False), (0, hvd.rank()))):
        values = np.random.default_rng(seed).normal(size=(5, 9))
        said = logged(partial(steps_of_a_tape, tf.Variable(values), compiled))
        assert len(said) == (others and number % 2), said
        assert all(f"{WEIGHTS_DIFFER} at step 2" in line for line in said), said


def steps_of_a_tape(variable: Any, compiled: bool) -> None:
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        variable.assign_sub(0.1 * hvd.DistributedGradientTape(tape).gradient(loss, variable))

    step = tf.function(step) if compiled else step
    for _ in range(4):
        step()


def gradients_of_some_passes_are_refused() -> None:
    variables = [tf.Variable([1.0]), tf.Variable([2.0])]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    optimizer.apply_gradients(zip([tf.ones([1])] * 2, variables, strict=True))
    with raising(ValueError, text="a gradient in some passes and none in others"):
        optimizer.apply_gradients(zip([tf.ones([1]), None], variables, strict=True))


def variables_are_kept_local() -> None:
    rank, size = hvd.rank(), hvd.size()
    variables = [tf.Variable([0.0]), tf.Variable([0.0])]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.register_local_var(variables[0])
    gradients = [tf.constant([float(rank + 1)])] * 2
    step = tf.function(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    step()
    assert step.experimental_get_tracing_count() == 1
    assert float(variables[0][0]) == -np.float32((rank + 1) / size)
    assert float(variables[1][0]) == -(size + 1) / 2


def options_of_the_tape() -> str:
    want, ends = of_one_rank(OPTIMIZERS[0]), []
    every_option: list[tuple[dict[str, Any], float]] = [
        ({"gradient_predivide_factor": 2.0}, 0.1),
        ({"groups": 2}, 0.1),
        ({"op": hvd.Sum, "groups": 3}, 0.1 / hvd.size()),
        ({"compression": hvd.Compression.bf16}, 0.1),
        ({"op": hvd.Adasum}, 0.1),
    ]
    for option, rate in every_option:
        wrap = partial(hvd.DistributedGradientTape, **option)
        ends.append(train(tf.keras.optimizers.SGD(rate), hvd.rank(), wrap))
        if not {"compression", "op"} & option.keys() or "groups" in option:
            assert_close(ends[-1], want)
    bad: list[dict[str, Any]] = [
        *({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, {"groups": 0}, {"op": "sum"}),
        *({"groups": 2, "num_groups": 2}, {"gradient_predivide_factor": 0.0}),
    ]
    for option in bad:
        with raising(ValueError):
            hvd.DistributedGradientTape(tf.GradientTape(), **option)
    with raising(ValueError, text="already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))
    return "-".join(map(digest, ends))


ROWS_OF_TABLE = 4


def part_of_loss(kind: str, table: Any, rank: int) -> Any:
    """Return a term whose gradient is of this kind; of a constant for "none"."""
    sparse = tf.reduce_sum(tf.gather(table, [rank, 3, 3]))
    dense = 10.0 * (rank + 1) * tf.reduce_sum(table)
    terms = {"sparse": sparse, "dense": dense, "both": sparse + dense}
    return terms.get(kind, tf.constant(0.0))


def mean_gradient(kinds: list[str]) -> Any:
    """Return the mean of all ranks' gradients of part_of_loss()."""
    total = np.zeros([ROWS_OF_TABLE, 2], np.float32)
    for rank, kind in enumerate(kinds):
        if kind in ("sparse", "both"):
            np.add.at(total, [rank, 3, 3], 1.0)
        if kind in ("dense", "both"):
            total += 10.0 * (rank + 1)
    return total / len(kinds)


BOTH_WAYS = (("sparse", "sparse"), ("sparse", "dense"))


def layouts_that_differ_between_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    pairs = itertools.combinations_with_replacement(("sparse", "dense", "both", "none"), 2)
    for (first, others), traced in itertools.product(list(pairs), (False, True)):
        for as_dense in (False, True) if (first, others) in BOTH_WAYS else (False,):
            kinds = [first, *[others] * (size - 1)]
            # A second variable of that shape has what the other ranks have of the first one.
            twins = [others, *[first] * (size - 1)]
            tables = [tf.Variable(tf.zeros([ROWS_OF_TABLE, 2])) for _ in "ab"]

            def step(
                tables: Any = tables, mine: Any = (kinds[rank], twins[rank]), dense: Any = as_dense
            ) -> Any:
                with tf.GradientTape() as tape:
                    pairs = zip(mine, tables, strict=True)
                    loss = sum(part_of_loss(kind, table, rank) for kind, table in pairs)
                tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense)
                gradients = tape.gradient(loss, dict(zip("ab", tables, strict=True)))
                return gradients["a"], gradients["b"]

            run = tf.function(step) if traced else step
            if traced and "none" in (first, others) and first != others:
                with raising(tf.errors.UnknownError, text="in the function that rank"):
                    run()
                continue
            for got, want in zip(run(), (kinds, twins), strict=True):
                if set(want) == {"none"}:
                    assert got is None
                    continue
                if not traced:
                    sparse = set(want) <= {"sparse", "none"} and not as_dense
                    assert isinstance(got, tf.IndexedSlices) is sparse, (want, got)
                got = tf.convert_to_tensor(got)
                np.testing.assert_allclose(got, mean_gradient(want), rtol=1e-6)


def penalties_on_gradients() -> None:
    """Of g = mean of c_r w over ranks, g^2 has the gradient 2 g c_r by w, which ranks sum up."""
    rank, size = hvd.rank(), hvd.size()
    mean, own = (size + 1) / 2, rank + 1.0
    for others, as_dense in itertools.product(("sparse", "dense"), (False, True)):
        kind = "sparse" if rank == 0 else others
        table, factor = tf.Variable(tf.ones([3, 1])), tf.Variable(2.0)

        def penalty(kind: Any = kind, dense: Any = as_dense, to: Any = (table, factor)) -> Any:
            table, factor = to
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    rows = tf.gather(table, [0, 0]) / 2 if kind == "sparse" else table[:1] * 1.0
                    loss = tf.reduce_sum(rows) * factor * own
                tape = hvd.DistributedGradientTape(inner, sparse_as_dense=dense)
                gradient = tf.convert_to_tensor(tape.gradient(loss, table))
                squares = tf.reduce_sum(gradient**2)
            return gradient, outer.gradient(squares, factor)

        for run in (penalty, tf.function(penalty)):
            gradient, slope = run()
            np.testing.assert_allclose(gradient[:, 0], [2 * mean, 0, 0], rtol=1e-6)
            np.testing.assert_allclose(slope, 2 * 2 * mean * own, rtol=1e-6)


def gradients_that_ranks_add_up_and_have_not_all() -> None:
    a, b = (tf.Variable(tf.zeros([2])) for _ in "ab")
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2, sparse_as_dense=True
    )
    for _ in range(2):
        ones = tf.ones([2])
        optimizer.apply([ones, None] if hvd.rank() == 0 else [None, ones], [a, b])
    np.testing.assert_allclose(a, [-2.0 / hvd.size()] * 2)
    np.testing.assert_allclose(b, [-2.0 * (hvd.size() - 1) / hvd.size()] * 2)


def local_layers_stay_local() -> None:
    rank, size = hvd.rank(), hvd.size()
    layers = [tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in "ab"]
    for scaled in (True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layers[1](layers[0](tf.ones([1, 1]) * float(rank + 1))))
        tape = hvd.PartialDistributedGradientTape(
            tape, local_layers=layers[0], scale_local_gradients=scaled
        )
        local, shared = tape.gradient(loss, [layer.trainable_weights[0] for layer in layers])
        assert float(local[0, 0]) == np.float32((rank + 1) / (size if scaled else 1))
        assert float(shared[0, 0]) == (size + 1) / 2
    with raising(ValueError, text="layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1])


def models_that_come_and_go_leave_no_memory() -> None:
    """A search through models must not keep the gradients of all that it has seen."""
    for number in range(1, 50):
        weight = tf.Variable(tf.zeros([number]))
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weight) * float(number * hvd.rank())
        mean = np.full(number, number * (hvd.size() - 1) / 2, np.float32)
        np.testing.assert_array_equal(tape.gradient(loss, weight), mean)
    caches = [cache for kept in context.current().kept.values() for cache in kept.values()]
    assert max(len(cache.plans) for cache in caches) in range(16, 40)
    assert all(cache.in_engine_memory <= 16 for cache in caches)


def different_models_are_refused() -> None:
    w = tf.Variable(tf.ones([2 + min(hvd.rank(), 1)]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(w)
    with raising(MismatchError, tf.errors.FailedPreconditionError, text="[rank 1/"):
        hvd.DistributedGradientTape(tape).gradient(loss, [w])


def the_documented_loop() -> str:
    return digest(check_keras_loop("tf.GradientTape", PAGE.with_name("tensorflow.md")))
