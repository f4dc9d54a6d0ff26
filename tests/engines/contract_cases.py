"""The contract of a communicator as a table of cases.

Inputs depend on the rank; expectations are formulas, never the result of another operation.
A case raises AssertionError, and the worker runs each one twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import factorial, prod
from typing import Any

import numpy as np
import numpy.typing as npt
from contract_small import exchange_messages, vote
from contract_special import SPECIAL_TYPES, reduce_special

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

Array = npt.NDArray[np.generic]

COUNTS = (0, 1, 7, 1001)
OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
FACTORED = (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)
HALVES = (DType.FLOAT16, DType.BFLOAT16)
LARGE_COUNT = (9 << 20) // 4 + 5  # more than two of the pieces that the mpi engine reduces


@dataclass(frozen=True)
class Case:
    title: str
    dtype: DType
    op: ReduceOp | None
    run: Callable[[Communicator], None]
    factors: bool = False
    rounded_once: bool = False
    messages: bool = False

    def objection(self, communicator: Communicator) -> str | None:
        probe = Buffer.from_array(np.zeros(1, self.dtype.numpy), self.dtype)
        if self.factors and self.dtype in HALVES and not communicator.capabilities.half_types:
            return f"factors of {self.dtype.value}"
        if self.rounded_once and not communicator.capabilities.rounds_once:
            return f"adding {self.dtype.value} in float32"
        if self.messages and not communicator.capabilities.point_to_point:
            return "messages between pairs of ranks"
        return communicator.capabilities.unsupported(probe, self.op)


def all_cases() -> Iterator[Case]:
    for dtype in DType:
        for count in COUNTS:
            for op in OPS:
                yield _case(f"allreduce {op.value}", dtype, op, _allreduce, count)
            for root in ("first", "last"):
                yield _case(f"broadcast from the {root}", dtype, None, _broadcast, count, root)
        yield _case("allgather", dtype, None, _allgather)
        yield _case("alltoall", dtype, None, _alltoall)
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            yield _case(f"reduce_scatter {op.value}", dtype, op, _reduce_scatter)
    for dtype in HALVES:
        yield _case("allreduce rounded once", dtype, ReduceOp.SUM, _rounded_once)
    for dtype in FACTORED + HALVES:
        yield _case("allreduce with factors", dtype, ReduceOp.SUM, _factors)
        yield _case("reduce_scatter with factors", dtype, ReduceOp.SUM, _reduce_scatter_factors)
    for dtype in filter(lambda dtype: dtype.is_integer, DType):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            yield _case(f"{op.value} beyond the type", dtype, op, _wrap)
    for dtype in SPECIAL_TYPES:
        for op in OPS:
            yield _case(f"special values {op.value}", dtype, op, reduce_special)
    large = (ReduceOp.SUM, _allreduce, LARGE_COUNT)
    yield _case("allreduce in several pieces", DType.FLOAT32, *large)
    yield _case("start_max", DType.INT64, None, _start_max)
    yield _case("split", DType.INT64, ReduceOp.SUM, _split)
    yield _case("two of the same ranks", DType.INT64, ReduceOp.SUM, _twins)
    for dtype in FACTORED + HALVES:
        yield _case("in engine memory", dtype, ReduceOp.SUM, _empty)
    yield _case("partly in engine memory", DType.FLOAT32, ReduceOp.SUM, _partly_empty)
    for dtype in (DType.FLOAT32, DType.INT32):
        yield _case("vote", dtype, ReduceOp.SUM, vote)
    yield Case("messages", DType.FLOAT64, None, exchange_messages, messages=True)


def _case(
    title: str, dtype: DType, op: ReduceOp | None, run: Callable[..., None], *args: object
) -> Case:
    arguments = [dtype, *([op] if run in _WITH_OP else []), *args]
    label = " ".join([title, dtype.value, *map(str, args)])
    factors = run in (_factors, _reduce_scatter_factors, _rounded_once, _empty)
    once = run is _rounded_once
    return Case(label, dtype, op, lambda communicator: run(communicator, *arguments), factors, once)


def pattern(rank: int, count: int, dtype: DType) -> Array:
    """Return what `rank` contributes: 3 (rank + 1) + i mod 7 (bool: rank + i mod 3 is not 0)."""
    if dtype is DType.BOOL:
        return (rank + np.arange(count)) % 3 != 0
    return encoded(3 * (rank + 1) + np.arange(count) % 7, dtype)


def encoded(values: npt.NDArray[Any], dtype: DType) -> Array:
    """Return numbers that the type can hold as elements; bfloat16 is the upper half of float32."""
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype.numpy)


def reduced(size: int, count: int, op: ReduceOp, dtype: DType) -> Array:
    """Return the reduction of `pattern` over `size` ranks (bool: SUM is or, MIN is and)."""
    if dtype is DType.BOOL:
        parts = np.array([pattern(rank, count, dtype) for rank in range(size)])
        return np.all(parts, 0) if op is ReduceOp.MIN else np.any(parts, 0)
    wave = np.arange(count) % 7
    if op is ReduceOp.SUM:
        return encoded(3 * size * (size + 1) // 2 + size * wave, dtype)
    return encoded(3 * (size if op is ReduceOp.MAX else 1) + wave, dtype)


def _buffer(array: Array, dtype: DType) -> Buffer:
    return Buffer.from_array(array, dtype)


def _same(got: Array, expected: Array) -> None:
    if got.dtype == bool:  # for which any byte but zero would do
        got, expected = got.view(np.uint8), expected.view(np.uint8)
    np.testing.assert_array_equal(got, expected)


def _allreduce(c: Communicator, dtype: DType, op: ReduceOp, count: int) -> None:
    if op is ReduceOp.PRODUCT:
        array = encoded(np.full(count, c.rank + 2), dtype)
        expected = encoded(np.full(count, factorial(c.size + 1)), dtype)
    else:
        array = pattern(c.rank, count, dtype)
        expected = reduced(c.size, count, op, dtype)
    c.allreduce(_buffer(array, dtype), op)
    _same(array, expected)


def _wrap(c: Communicator, dtype: DType, op: ReduceOp) -> None:
    """Of a sum or product that the type cannot hold, the lowest bits stay."""
    largest = int(np.iinfo(dtype.value).max)
    array = np.full(7, largest - c.rank, dtype.numpy)
    c.allreduce(_buffer(array, dtype), op)
    total = (sum if op is ReduceOp.SUM else prod)(largest - rank for rank in range(c.size))
    low = np.full(7, total % 2 ** (8 * dtype.itemsize), f"uint{8 * dtype.itemsize}")
    _same(array, low.view(dtype.numpy))


def _factors(c: Communicator, dtype: DType) -> None:
    _reduce_with_factors(c, np.empty(1001, dtype.numpy), dtype)


def _reduce_with_factors(c: Communicator, array: Array, dtype: DType) -> None:
    # sum_r (r + 1) * pattern_r with wave w: sum_k 3 k^2 + k w for k = 1..N, then halved.
    array[:] = pattern(c.rank, array.size, dtype)
    c.allreduce(_buffer(array, dtype), ReduceOp.SUM, float(c.rank + 1), 0.5)
    squares, total = c.size * (c.size + 1) * (2 * c.size + 1) // 6, c.size * (c.size + 1) // 2
    _same(array, encoded((3 * squares + total * (np.arange(array.size) % 7)) * 0.5, dtype))


def _rounded_once(c: Communicator, dtype: DType) -> None:
    # 2^k and N - 1 ones, halved and rounded to even; to add 1 to 2^k in this type is to lose it.
    top = 2048 if dtype is DType.FLOAT16 else 256
    array = encoded(np.full(1001, top / 2 if c.rank == 0 else 0.5), dtype)
    c.allreduce(_buffer(array, dtype), ReduceOp.SUM, 2.0, 0.5)
    _same(array, encoded(np.full(1001, np.rint((top + c.size - 1) / 2)), dtype))
    if dtype is DType.FLOAT16:  # an average does not overflow on the way
        array = encoded(np.full(3, 60000.0 + 64 * c.rank), dtype)
        c.allreduce(_buffer(array, dtype), ReduceOp.SUM, 1.0, 1 / c.size)
        _same(array, encoded(np.full(3, 60000.0 + 32 * (c.size - 1)), dtype))


def _broadcast(c: Communicator, dtype: DType, count: int, root: str) -> None:
    root_rank = 0 if root == "first" else c.size - 1
    array = pattern(c.rank, count, dtype)
    c.broadcast(_buffer(array, dtype), root_rank)
    _same(array, pattern(root_rank, count, dtype))


def _allgather(c: Communicator, dtype: DType) -> None:
    for scale in (1, 300):  # the second is more than tests with small pieces send at once
        counts = [(5 * rank + 3) % 7 * scale for rank in range(c.size)]  # 3, 1, 6, 4
        counts[-1] = 0 if c.size > 1 else 3
        send = pattern(c.rank, counts[c.rank], dtype)
        receive = np.zeros(sum(counts), dtype.numpy)
        c.allgather(_buffer(send, dtype), _buffer(receive, dtype), counts)
        _same(receive, np.concatenate([pattern(r, counts[r], dtype) for r in range(c.size)]))


def _alltoall(c: Communicator, dtype: DType) -> None:
    def count(source: int, target: int) -> int:
        return (2 * source + 3 * target) % 5  # zero for some pairs

    def part(source: int, target: int) -> Array:
        return pattern(source + 2 * target, count(source, target), dtype)

    ranks = range(c.size)
    send = np.concatenate([part(c.rank, target) for target in ranks])
    expected = np.concatenate([part(source, c.rank) for source in ranks])
    receive = np.zeros_like(expected)
    c.alltoall(
        _buffer(send, dtype),
        _buffer(receive, dtype),
        [count(c.rank, target) for target in ranks],
        [count(source, c.rank) for source in ranks],
    )
    _same(receive, expected)


def _scatter_counts(c: Communicator) -> list[int]:
    return [301 + rank if rank != 1 else 0 for rank in range(c.size)]


def _own_part(c: Communicator, whole: Array, counts: list[int]) -> Array:
    start = sum(counts[: c.rank])
    return whole[start : start + counts[c.rank]]


def _reduce_scatter(c: Communicator, dtype: DType, op: ReduceOp) -> None:
    even = [15 if rank == 0 else 10 for rank in range(c.size)]  # rows of 5, dealt like Horovod's
    for counts in (_scatter_counts(c), even, [0] * c.size):
        _check_scattered(c, counts, reduced(c.size, sum(counts), op, dtype), dtype, op)


def _check_scattered(
    c: Communicator, counts: list[int], whole: Array, dtype: DType, *how: Any
) -> None:
    send = pattern(c.rank, sum(counts), dtype)
    before = send.copy()
    receive = np.zeros(counts[c.rank], dtype.numpy)
    c.reduce_scatter(_buffer(send, dtype), _buffer(receive, dtype), counts, *how)
    _same(receive, _own_part(c, whole, counts))
    _same(send, before)


def _reduce_scatter_factors(c: Communicator, dtype: DType) -> None:
    # sum_r r (3 (r + 1) + w) = 3 sum (r^2 + r) + w sum r for r = 0..N-1, doubled.
    counts = _scatter_counts(c)
    n, wave = c.size, np.arange(sum(counts)) % 7
    squares, total = (n - 1) * n * (2 * n - 1) // 6, n * (n - 1) // 2
    whole = encoded(2 * (3 * (squares + total) + total * wave), dtype)
    _check_scattered(c, counts, whole, dtype, ReduceOp.SUM, float(c.rank), 2.0)


def _start_max(c: Communicator, dtype: DType) -> None:
    values = np.array([c.rank, 100 - c.rank, 2**64 - 1 - c.rank], np.uint64)
    pending = c.start_max(values)
    while not pending.test():
        pass
    _same(values, np.array([c.size - 1, 100, 2**64 - 1], np.uint64))


def _split(c: Communicator, dtype: DType) -> None:
    chosen = list(range(c.size))[::-2]  # every other rank, the last one first
    part = c.split(chosen)
    assert (part is not None) == (c.rank in chosen)
    if part is not None:
        assert (part.rank, part.size) == (chosen.index(c.rank), len(chosen))
        array = np.array([10**c.rank], np.int64)
        part.allreduce(_buffer(array, dtype), ReduceOp.SUM)
        assert array[0] == sum(10**rank for rank in chosen)
        for run in (_allgather, _alltoall):
            run(part, dtype)
        _broadcast(part, dtype, 7, "first")
        _reduce_scatter(part, dtype, ReduceOp.SUM)
        part.close()
        part.close()  # does nothing


def _twins(c: Communicator, dtype: DType) -> None:
    twins = [c.split(range(c.size)) for _ in range(2)]
    for one, other in (twins, twins[::-1]):
        assert one is not None
        assert other is not None
        values = np.array([c.rank], np.uint64)
        pending = one.start_max(values)
        _allreduce(other, dtype, ReduceOp.SUM, 7)
        while not pending.test():
            pass
        _same(values, np.array([c.size - 1], np.uint64))
    for twin in twins:
        assert twin is not None
        twin.close()


def _empty(c: Communicator, dtype: DType) -> None:
    for count in (0, 1001, 300_007):
        memory = np.asarray(c.empty((count + 16) * dtype.itemsize)).view(dtype.numpy)
        memory[:] = 77
        _reduce_with_factors(c, memory[16:], dtype)
        assert (memory[:16] == 77).all()


def _partly_empty(c: Communicator, dtype: DType) -> None:
    count = 300_007
    memory = np.asarray(c.empty(count * dtype.itemsize)).view(dtype.numpy)
    array = np.empty_like(memory) if c.rank == c.size - 1 else memory
    array[:] = pattern(c.rank, count, dtype)
    c.allreduce(_buffer(array, dtype), ReduceOp.SUM)
    _same(array, reduced(c.size, count, ReduceOp.SUM, dtype))


_WITH_OP = (_allreduce, _reduce_scatter, _wrap, reduce_special)
