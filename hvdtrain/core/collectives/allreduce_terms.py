"""What all-reduces have in common that differ only in their tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType, ReduceOp

# Copying larger buffers into a batch takes longer than reducing them one by one.
_TOGETHER_BYTES = 128 << 10


class Terms(NamedTuple):
    """What all-reduces have in common that differ only in their tensors."""

    op: ReduceOp
    prescale: float
    postscale: float
    batch_key: Hashable


def batch_key_of(
    buffers: Sequence[Buffer], op: ReduceOp, prescale: float, postscale: float
) -> Hashable:
    """Return the batch key of a reduction; see `Operation.batch_key`."""
    dtype = buffers[0].dtype
    # Factors truncate each integer, for which engines have no call on many tensors.
    factors = dtype.is_integer and (prescale, postscale) != (1.0, 1.0)
    if (
        factors
        or op is ReduceOp.ADASUM
        or any(
            b.dtype is not dtype or b.nbytes > _TOGETHER_BYTES or b.device != "cpu" for b in buffers
        )
    ):
        return None
    return _key(op, dtype, prescale, postscale)


# Operations of one batch have one object as their key, which is compared sooner than tuples.
@lru_cache(maxsize=1024)
def _key(*terms: Hashable) -> Hashable:
    return terms


def engine_reduction(
    op: ReduceOp, dtype: DType, postscale: float, size: int
) -> tuple[ReduceOp, float, bool]:
    """Return how an engine computes a reduction."""
    if op is not ReduceOp.AVERAGE:
        return op, postscale, False
    if dtype.is_integer:
        return ReduceOp.SUM, postscale, True
    return ReduceOp.SUM, postscale / size, False
