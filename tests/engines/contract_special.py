"""The contract for NaN, infinity, zeros with a sign, and denormal numbers."""

from math import inf, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

# The smallest number above zero of each type.
SPECIAL_TYPES = {
    DType.FLOAT16: 2.0**-24,
    DType.BFLOAT16: 2.0**-133,
    DType.FLOAT32: 2.0**-149,
    DType.FLOAT64: 2.0**-1074,
}
_BATCH, _LARGE = 5, (1 << 18) + 5


def reduce_special(c: Communicator, dtype: DType, op: ReduceOp) -> None:
    """Reduce special values that each rank holds in turn, in every place of short and long rows."""
    tiny = SPECIAL_TYPES[dtype]
    # What one rank holds, and all others.
    pairs = np.array(
        [
            *((nan, 1), (-nan, 1), (nan, inf), (-nan, -inf), (nan, nan), (inf, 1), (-inf, 1)),
            *((inf, -inf), (-0.0, 1), (-0.0, -1), (-0.0, -0.0), (tiny, 0), (-tiny, 0), (tiny, -1)),
            (-0.0, 0),
        ]
    )
    # The tail and the body of loops over vectors; pieces of what is shared between nodes.
    counts = (_BATCH, 17, *([_LARGE] if dtype is DType.FLOAT32 and op is ReduceOp.MAX else []))
    for holder in range(c.size):
        for count in counts:
            for start in range(0, len(pairs), _BATCH):
                rows = pairs[(start + np.arange(count)) % len(pairs)]
                _reduce(c, dtype, op, rows[:, 0], rows[:, 1], holder)


def _reduce(
    c: Communicator,
    dtype: DType,
    op: ReduceOp,
    special: npt.NDArray[np.float64],
    other: npt.NDArray[np.float64],
    holder: int,
) -> None:
    own = _encoded(special if c.rank == holder else other, dtype)
    count = len(own)
    send = np.tile(own, c.size)
    part = np.zeros_like(own)
    c.allreduce(Buffer.from_array(own, dtype), op)
    c.reduce_scatter(
        Buffer.from_array(send, dtype), Buffer.from_array(part, dtype), [count] * c.size, op
    )
    expected = expected_of(special, other, c.size, op)
    for name, got in (("allreduce", own), ("reduce_scatter", part)):
        values, rounded = _decoded(got, dtype), _decoded(_encoded(expected, dtype), dtype)
        # -0.0 equals 0.0, and NaN has any sign, as has the larger or smaller one of zeros.
        right = np.where(np.isnan(rounded), np.isnan(values), values == rounded)
        signless = np.isnan(rounded)
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            signless |= (special == other) & (np.signbit(special) != np.signbit(other))
        right &= signless | (np.signbit(values) == np.signbit(rounded))
        (wrong,) = np.nonzero(~right)
        assert not wrong.size, (
            f"{name} of {special[wrong[0]]} on rank {holder} and {other[wrong[0]]}: "
            f"got {values[wrong[0]]}, expected {rounded[wrong[0]]}, at {wrong[:5]} of {count}"
        )


def expected_of(
    special: npt.NDArray[np.float64], other: npt.NDArray[np.float64], size: int, op: ReduceOp
) -> npt.NDArray[np.float64]:
    fold = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }[op]
    """Return the reduction of values that one rank has, and others that all others have."""
    total = special
    with np.errstate(all="ignore"):
        for _ in range(size - 1):
            total = fold(total, other)
    return total


def _encoded(values: npt.NDArray[np.float64], dtype: DType) -> npt.NDArray[Any]:
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype.numpy)


def _decoded(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float64]:
    if dtype is DType.BFLOAT16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
