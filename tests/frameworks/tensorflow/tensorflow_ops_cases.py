"""Operations of hvdtrain.tensorflow on every rank, against formulas."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from process_sets import assert_lists_are_refused
from raising import raising

import hvdtrain.tensorflow as hvd
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.types import ReduceOp

Array = np.ndarray[Any, Any]

TYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8)


def input_of(rank: int, dtype: Any = tf.float32) -> Array:
    """Return what a rank puts in: small whole numbers, which no type rounds."""
    return np.asarray([[rank + 1, 2 * rank], [3, rank]]).astype(dtype.as_numpy_dtype)


def expected(op: ReduceOp, dtype: Any = tf.float32) -> Array:
    every = np.stack([input_of(r).astype(np.float64) for r in range(hvd.size())])
    fold = {
        hvd.Sum: lambda: every.sum(0),
        hvd.Average: lambda: every.mean(0),
        hvd.Min: lambda: every.min(0),
        hvd.Max: lambda: every.max(0),
        hvd.Product: lambda: every.prod(0),
    }
    return fold[op]().astype(dtype.as_numpy_dtype)


def both_modes(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [function, tf.function(function, autograph=False)]


def reductions_of_all_types() -> None:
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        for mode in both_modes(lambda *xs, op=op: hvd.grouped_allreduce(list(xs), op=op)):
            reduced = mode(*[tf.constant(input_of(hvd.rank(), dtype)) for dtype in TYPES])
            for dtype, result in zip(TYPES, reduced, strict=True):
                assert result.dtype == dtype
                close = 1e-2 if dtype in (tf.float16, tf.bfloat16) else 1e-6
                np.testing.assert_allclose(
                    result.numpy().astype(np.float64),
                    expected(op, dtype).astype(np.float64),
                    rtol=close,
                )
    for op, mine, theirs in [(hvd.Sum, hvd.rank() == 0, True), (hvd.Min, hvd.rank() == 0, False)]:
        assert hvd.allreduce(tf.constant([mine]), op=op).numpy().tolist() == [theirs]


def factors_compression_and_slices() -> None:
    rank, size = hvd.rank(), hvd.size()
    x = tf.constant(input_of(rank))
    for mode in both_modes(
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0, name="f")
    ):
        np.testing.assert_allclose(mode(x), 6 * expected(hvd.Sum))
    third = tf.constant([1 / 3])
    rounded = float(tf.cast(tf.cast(third, tf.float16), tf.float32)[0])
    got = hvd.allreduce(third, compression=hvd.Compression.fp16)
    assert got.dtype == tf.float32
    np.testing.assert_allclose(got, [rounded], rtol=1e-6)
    with raising(ValueError, text="pass only op"):
        hvd.allreduce(x, average=True, op=hvd.Sum)

    def slices(values: Any) -> Any:
        rows = tf.IndexedSlices(values, tf.range(rank + 1), tf.constant([size, 2]))
        return tf.convert_to_tensor(hvd.allreduce(rows, op=hvd.Average))

    parts = map(tf.constant, ([[rank]], [rank], [size, 1]))
    whole = hvd.allreduce(tf.IndexedSlices(*parts), op=hvd.Sum)
    assert whole.values.dtype == tf.int32
    assert tf.convert_to_tensor(whole)[:, 0].numpy().tolist() == list(range(size))

    # Row i has the ones of ranks i and above.
    want = np.repeat([[(size - i) / size] for i in range(size)], 2, axis=1)
    for mode in both_modes(slices):
        np.testing.assert_allclose(mode(tf.ones([rank + 1, 2])), want, rtol=1e-6)


def gathers_broadcasts_and_exchanges() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = tf.fill([rank, 2], float(rank))  # rank 0 has no rows
    want = np.concatenate([np.full((r, 2), r, np.float32) for r in range(size)])
    for mode in both_modes(lambda x, y: hvd.grouped_allgather([x, y])):
        rows, numbers = mode(mine, tf.constant(rank))
        np.testing.assert_array_equal(rows, want)
        assert numbers.numpy().tolist() == list(range(size))
    for root in range(size):
        for mode in both_modes(lambda x, root=root: hvd.broadcast(x, root)):
            np.testing.assert_array_equal(mode(tf.constant(input_of(rank))), input_of(root))
    # Rank r sends s + 1 rows to rank s.
    counts = list(range(1, size + 1))
    given = tf.repeat(tf.range(size) + 10 * rank, counts)
    for mode in both_modes(lambda x, splits: hvd.alltoall(x, splits)):
        rows, received = mode(given, tf.constant(counts))
        assert received.numpy().tolist() == [rank + 1] * size
        assert rows.numpy().tolist() == [
            rank + 10 * r for r in range(size) for _ in range(rank + 1)
        ]
    assert hvd.alltoall(tf.range(size)).numpy().tolist() == [rank] * size
    table = tf.reshape(tf.range((size + 1) * 2), [size + 1, 2]) * (rank + 1)
    total = size * (size + 1) // 2
    begin, end = (0, 2) if rank == 0 else (rank + 1, rank + 2)  # rank 0 has the larger part
    whole = np.arange((size + 1) * 2).reshape(-1, 2) * total
    for mode in both_modes(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
        part = mode(table)
        assert part.shape == (end - begin, 2)
        np.testing.assert_array_equal(part, whole[begin:end])
    averaged = [tf.cast(table, tf.float32), tf.cast(table, tf.float64)]
    for mode in both_modes(
        lambda x, y: hvd.grouped_reducescatter([x, y], prescale_factor=2.0, postscale_factor=3.0)
    ):
        for part in mode(*averaged):
            np.testing.assert_allclose(part, 6 * whole[begin:end] / size, rtol=1e-6)
    with raising(ValueError, text="bool and other"):
        hvd.grouped_allreduce([tf.constant([True]), tf.constant([1.0])])


def gradients_of_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    mean = total / size
    x = tf.ones([size, 2]) * (rank + 1)

    def slices(x: Any) -> Any:
        return tf.convert_to_tensor(hvd.allreduce(tf.IndexedSlices(x, tf.range(size), x.shape)))

    # Derivatives of sum(f(x)^2 / 2): rank r's x is r + 1, and the last rank's is broadcast.
    is_root = rank == size - 1
    twice: list[tuple[Callable[[Any], Any], float, float]] = [
        (hvd.allreduce, mean, 1),
        (slices, mean, 1),
        (lambda x: hvd.allreduce(x, op=hvd.Sum), size * total, size * size),
        (hvd.allgather, rank + 1, 1 / size),
        (lambda x: hvd.broadcast(x, size - 1), size * is_root, is_root / size),
        (hvd.alltoall, rank + 1, 1),
        (hvd.reducescatter, mean, size),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), size * total, size**3),
    ]
    for number, (operation, want_first, want_second) in enumerate(twice):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(operation(x) ** 2) / 2
            first = inner.gradient(y, x)
        for got, want in ((first, want_first), (outer.gradient(first, x), want_second)):
            np.testing.assert_allclose(got, np.full((size, 2), want), err_msg=f"operation {number}")
    for operation in (hvd.allreduce, hvd.reducescatter):
        with tf.GradientTape() as tape, raising(ValueError, text="has no gradient: use Average"):
            tape.watch(x)
            tape.gradient(operation(x, op=hvd.Max), x)


def gradients_of_operations_in_branches_and_loops() -> None:
    rank = hvd.rank()

    @tf.function
    def slope(x: Any, go: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(go, lambda: hvd.allreduce(x**2), lambda: x)
            for _ in tf.range(2):
                y = hvd.allreduce(3.0 * y)
        return tape.gradient(y, x)

    x = tf.constant([rank + 1.0])
    np.testing.assert_allclose(slope(x, tf.constant(True)), 9 * 2 * x)
    np.testing.assert_allclose(slope(x, tf.constant(False)), [9])


def shapes_are_known_in_graphs() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def graph(x: Any) -> Any:
        assert hvd.allreduce(x).shape.as_list() == [None, 3]
        assert hvd.allgather(x).shape.as_list() == [None, 3]
        assert hvd.broadcast(tf.ones([2, 3]), 0).shape.as_list() == [2, 3]
        rows, received = hvd.alltoall(x, tf.fill([hvd.size()], 1))
        assert rows.shape.as_list() == [None, 3]
        assert received.shape.as_list() == [hvd.size()]
        assert hvd.reducescatter(tf.ones([hvd.size(), 3])).shape.as_list() == [1, 3]
        assert hvd.size_op().shape.as_list() == []
        return rows

    assert graph(tf.ones([hvd.size(), 3])).shape == (hvd.size(), 3)


def order_in_a_function_is_that_of_the_trace() -> None:
    """A loop, a branch and calls that do not depend on one another, traced more often on rank 0."""

    @tf.function
    def graph(x: Any) -> Any:
        first = hvd.allreduce(x, op=hvd.Sum)
        second = hvd.allreduce(x * 2.0, op=hvd.Sum)
        total = tf.zeros([])
        for i in tf.range(3):
            total += hvd.allreduce(tf.cast(i, tf.float32), op=hvd.Sum)
        if tf.reduce_sum(second) > 0.0:
            total += hvd.allreduce(1.0, op=hvd.Sum)
        return tf.reduce_sum(first), tf.reduce_sum(second), total

    for step in range(2):
        length = 5 if hvd.rank() == 0 and step == 1 else 4  # a new shape: traced once more
        part = tf.ones([length])
        got = graph(tf.reduce_sum(part)[None] / length)
        graph.get_concrete_function(part)  # traces, and runs nothing
        size = float(hvd.size())
        assert [float(g) for g in got] == [size, 2 * size, 4 * size]


def functions_in_a_function_keep_its_order() -> None:
    """Two steps that share no variable: TensorFlow would run them at the same time."""
    rank, size = hvd.rank(), hvd.size()

    def step_of(weight: tf.Variable) -> Callable[[Any], None]:
        @tf.function
        def step(scale: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight) * scale
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
            weight.assign_sub(gradient)

        return step

    weights = [tf.Variable(tf.zeros([51])) for _ in range(2)]
    first, second = map(step_of, weights)

    @tf.function
    def both(scale: Any) -> None:
        first(scale)
        hvd.allreduce(scale)
        second(2.0 * scale)

    for _ in range(10):
        both(tf.constant(float(rank)))
    for number, weight in enumerate(weights):
        np.testing.assert_allclose(weight, [-5.0 * (number + 1) * (size - 1)] * 51)


def process_sets_that_are_lists() -> None:
    tensor, variables = tf.ones(hvd.size()), [tf.Variable(1.0)]
    arguments = {
        "tensor": tensor, "tensors": [tensor], "inplace_vars": variables, "obj": 1,
        "variables": variables, "root_rank": 0, "gradtape": tf.GradientTape(), "op": hvd.Sum,
        "optimizer": tf.keras.optimizers.SGD(), "variable": variables[0],
    }  # fmt: skip
    assert_lists_are_refused(hvd, arguments, 12)


def objects_variables_and_facts() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.broadcast_object_fn(1)([rank]) == [1]
    assert hvd.allgather_object(rank) == list(range(size))
    variables = [tf.Variable(input_of(rank)), tf.Variable(rank, dtype=tf.int64)]
    hvd.broadcast_variables(variables, root_rank=1)
    np.testing.assert_array_equal(variables[0], input_of(1))
    assert int(variables[1]) == 1
    assert int(hvd.broadcast_([tf.Variable(rank)], 0)[0]) == 0
    for mode in both_modes(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op()]):
        assert [int(fact) for fact in mode()] == [rank, size, rank]
    hvd.barrier()
    assert (int(hvd.local_size_op()), hvd.is_homogeneous()) == (size, True)


def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    rest = hvd.add_process_set(list(range(1, size)))
    number = rest.process_set_id
    assert number is not None
    assert int(hvd.process_set_included_op(number)) == (rank > 0)
    assert int(hvd.process_set_included_op(77)) == -2
    assert int(hvd.size_op(number)) == size - 1
    if rank:
        for mode in both_modes(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=rest)):
            np.testing.assert_allclose(mode(tf.constant([float(rank)])), [size * (size - 1) / 2])
        assert hvd.broadcast(rank, size - 1, process_set=rest).numpy() == size - 1
    w = tf.Variable([1.0])
    with hvd.DistributedGradientTape(tf.GradientTape(), process_set=rest) as tape:
        loss = w * float(rank)
    mean = size / 2  # of 1 .. size - 1
    assert float(tape.gradient(loss, w)[0]) == (mean if rank else 0.0)
    assert hvd.remove_process_set(rest)


def run_in_graph(function: Callable[[], Any], of_session: bool) -> None:
    if not of_session:
        tf.function(function, autograph=False)()
        return
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(function())


def bad_input() -> None:
    rank, size = hvd.rank(), hvd.size()
    wrong = tf.ones([3 if rank else 2])
    failed = tf.errors.FailedPreconditionError
    with raising(MismatchError, hvd.HorovodInternalError, failed, text="rank 0 sent"):
        hvd.allreduce(wrong, name="wrong shape")
    with raising(MismatchError, failed, text="root_rank"):
        hvd.broadcast(tf.ones([2]), min(rank, 1), name="wrong root")
    with raising(tf.errors.UnknownError, text="rank 0 sent allreduce 'wrong'"):
        tf.function(lambda: hvd.allreduce(wrong, name="wrong"), autograph=False)()
    invalid = tf.errors.InvalidArgumentError
    with raising(ValueError, invalid, text=f"root_rank {size}"):
        hvd.broadcast(tf.ones([2]), size)
    with raising(ValueError, invalid, text="is not divisible"):
        hvd.alltoall(tf.ones([size + 1]))
    with raising(ValueError, invalid, text="scalar"):
        hvd.reducescatter(1.0)
    # In graphs TensorFlow has no other classes for what Python raises.
    for of_session in (False, True):
        with raising(invalid, text="is not divisible"):
            run_in_graph(lambda: hvd.alltoall(tf.ones([size + 1])), of_session)
        with raising(invalid, text="scalar"):
            run_in_graph(lambda: hvd.reducescatter(tf.constant(1.0)), of_session)
        with raising(tf.errors.UnknownError, text="rank 0 sent allreduce"):
            run_in_graph(lambda: hvd.allreduce(tf.zeros([2 + rank]), name="sizes"), of_session)
    with raising(UnsupportedError, text="jit_compile=False"):
        tf.function(lambda: hvd.allreduce(tf.ones([2])), jit_compile=True, autograph=False)()
    with raising(MismatchError, text="Build the same model"):
        hvd.broadcast_variables([tf.Variable(wrong)], 0)
    with raising(RuntimeError, text="eager"):
        hvd.broadcast_global_variables(0)
