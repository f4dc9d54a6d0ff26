"""Gradients that ranks read where TensorFlow has allocated them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.collectives import Lending
from hvdtrain.core.places import LentBucket
from hvdtrain.tensorflow.allocator import why_no_allocator

# Two are large enough to be served, and the small one is copied.
SHAPES = [(160, 128), (130, 256), (8, 8)]
STEPS, RATE, MOMENTUM = 6, 0.125, 0.5


@contextmanager
def noting() -> Iterator[list[bool]]:
    noted: list[bool] = []
    lend = Lending.lend

    def note(self: Lending, bucket: LentBucket | None, index: int, array: HostArray) -> bool:
        lent = lend(self, bucket, index, array)
        if bucket is not None and array.nbytes >= 64 << 10:
            noted.append(lent)
        return lent

    Lending.lend = note  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        Lending.lend = lend  # type: ignore[method-assign]


def factors(rank: int, step: int) -> list[Any]:
    """Return two rows for each variable, small integers, whose product is its gradient."""
    random = np.random.default_rng(100 * step + rank)
    sizes = [size for shape in SHAPES for size in shape]
    return [random.integers(-8, 9, size=(1, size)).astype(np.float32) for size in sizes]


def local(rank: int, step: int) -> list[Any]:
    rows = factors(rank, step)
    return [left.T @ right for left, right in zip(rows[::2], rows[1::2], strict=True)]


def average(step: int, ranks: int | None = None) -> list[Any]:
    size = hvd.size()
    own = [local(rank, step) for rank in range(ranks or size)]
    return [sum(each) / np.float32(size) for each in zip(*own, strict=True)]


def check(results: Any, expected: Any, atol: float = 1e-5) -> None:
    for result, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(result.numpy(), want, rtol=1e-5, atol=atol)


def reduced(variables: list[Any], rows: list[Any]) -> Any:
    triples = list(zip(rows[::2], variables, rows[1::2], strict=True))
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum((left @ v) * right) for left, v, right in triples)
    return hvd.DistributedGradientTape(tape).gradient(loss, variables)


def large_gradients_are_not_copied() -> str:
    assert not why_no_allocator(), why_no_allocator()
    variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    optimizer = tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step(*rows: Any) -> None:
        optimizer.apply(reduced(variables, list(rows)), variables)

    want = [np.zeros(shape, np.float32) for shape in SHAPES]
    velocities = [np.zeros(shape, np.float32) for shape in SHAPES]
    with noting() as noted:
        for number in range(STEPS):
            step(*map(tf.constant, factors(hvd.rank(), number)))
            for index, gradient in enumerate(average(number)):
                velocities[index] = MOMENTUM * velocities[index] - RATE * gradient
                want[index] = want[index] + velocities[index]
    check(variables, want, 1e-4)
    assert noted[-4:] == [True] * 4, noted
    return b"".join(v.numpy().tobytes()[:8] for v in variables).hex()


def lent_gradients_stay_what_they_are() -> None:
    variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.build(variables)
    kept = []
    with noting() as noted:
        for number in range(STEPS):
            rows = factors(hvd.rank(), number)
            # The optimizer multiplies no matrices, so it takes no blocks of gradients.
            own = [tf.matmul(2 * a, b, True) for a, b in zip(rows[::2], rows[1::2], strict=True)]
            optimizer.apply(own, variables)
            kept.append(own)
    assert sum(noted) == 4, noted  # each has two blocks, which are kept
    total = [np.zeros(shape, np.float32) for shape in SHAPES]
    for number, own in enumerate(kept):
        for index, (mine, alone) in enumerate(zip(own, local(hvd.rank(), number), strict=True)):
            np.testing.assert_array_equal(mine.numpy(), 2 * alone)
            total[index] -= 2 * average(number)[index]
    check(variables, total, 1e-4)


def results_stay_what_they_are() -> None:
    variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    with noting() as noted:
        kept = [reduced(variables, factors(hvd.rank(), number)) for number in range(STEPS)]
    assert noted[-8:] == [True] * 8, noted  # results take no blocks of gradients
    for number, results in enumerate(kept):
        check(results, average(number))


def gradients_are_lent_while_a_rank_has_joined() -> None:
    variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    for number in range(3):
        reduced(variables, factors(hvd.rank(), number))
    if hvd.rank() == 0:
        check(reduced(variables, factors(0, 3)), average(3, ranks=1))
    hvd.join()
    check(reduced(variables, factors(hvd.rank(), 4)), average(4))


def other_tensors_may_take_all_memory_for_gradients() -> None:
    variables = [tf.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    kept = []

    @tf.function(jit_compile=True, autograph=False)
    def gradients(*rows: Any) -> list[Any]:
        return [tf.transpose(a) @ b for a, b in zip(rows[::2], rows[1::2], strict=True)]

    for number in range(STEPS):
        own = gradients(*map(tf.constant, factors(hvd.rank(), number)))
        kept.append(own)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
        before = [variable.numpy() for variable in variables]
        optimizer.apply(own, variables)
        moved = [was - mean for was, mean in zip(before, average(number), strict=True)]
        check(variables, moved, 1e-4)
    for number, own in enumerate(kept):
        for mine, alone in zip(own, local(hvd.rank(), number), strict=True):
            np.testing.assert_array_equal(mine.numpy(), alone)
