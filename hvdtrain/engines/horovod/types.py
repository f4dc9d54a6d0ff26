"""The types that Horovod reduces, and conversions for those that it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.engines.float_order import from_ordered, is_ordered, to_ordered
from hvdtrain.engines.horovod.memory import elements, words
from hvdtrain.types import DType, ReduceOp

# horovod.torch has no reduction for other types. float16 is rounded after every addition.
NATIVE = frozenset({DType.INT32, DType.INT64, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64})
_WIDER = {
    DType.BOOL: DType.INT32,
    DType.UINT8: DType.INT32,
    DType.INT8: DType.INT32,
    DType.UINT16: DType.INT32,
    DType.INT16: DType.INT32,
    DType.UINT32: DType.INT64,
    DType.BFLOAT16: DType.FLOAT32,
}
_WIDER_ORDERED = _WIDER | {DType.FLOAT16: DType.FLOAT32}
_PARTS = {DType.COMPLEX64: torch.float32, DType.COMPLEX128: torch.float64}
_REAL = frozenset(DType) - _PARTS.keys()
REDUCES = {
    ReduceOp.SUM: frozenset(DType),  # real and imaginary parts are added separately
    ReduceOp.MIN: _REAL,
    ReduceOp.MAX: _REAL,
    ReduceOp.PRODUCT: _REAL,
}

_SIGN = -(1 << 63)  # flipping it preserves the order when unsigned bits are read as signed


def widening(dtype: DType, op: ReduceOp) -> int:
    """Return the factor by which an element grows when it is reduced by Horovod."""
    return _widths(op).get(dtype, dtype).itemsize // dtype.itemsize


def _widths(op: ReduceOp) -> Mapping[DType, DType]:
    return _WIDER_ORDERED if op in (ReduceOp.MIN, ReduceOp.MAX) else _WIDER


@contextmanager
def reducible_tensor(buffer: Buffer, op: ReduceOp) -> Iterator[torch.Tensor]:
    """Return a context with a tensor for Horovod to reduce; on exit `buffer` gets the result.

    When wide integers are converted back, overflow wraps around as in the narrow type.
    """
    tensor = elements(buffer)
    if buffer.dtype is DType.UINT64:
        signed = words(buffer)
        ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
        if ordered:
            signed.bitwise_xor_(_SIGN)
        yield signed
        if ordered:
            signed.bitwise_xor_(_SIGN)
    elif (wider := _widths(op).get(buffer.dtype)) is not None:
        wide = Buffer.of(tensor.to(getattr(torch, wider.value)))
        with reducible_tensor(wide, op) as reducible:
            yield reducible
        tensor.copy_(elements(wide))
    elif is_ordered(buffer.dtype, op):
        integers = to_ordered(buffer.host(), op)
        yield elements(integers)
        from_ordered(integers, buffer)
    else:
        yield tensor.view(_PARTS.get(buffer.dtype, tensor.dtype))
