"""MPI's data types and operations for the element types and reductions."""

from __future__ import annotations

from mpi4py import MPI

from hvdtrain.buffer import Buffer
from hvdtrain.types import DType, ReduceOp

# Arithmetic for half types and bool differs between MPI libraries.
MPI_TYPES: dict[DType, MPI.Datatype] = {
    DType.UINT8: MPI.UINT8_T,
    DType.UINT16: MPI.UINT16_T,
    DType.UINT32: MPI.UINT32_T,
    DType.UINT64: MPI.UINT64_T,
    DType.INT8: MPI.INT8_T,
    DType.INT16: MPI.INT16_T,
    DType.INT32: MPI.INT32_T,
    DType.INT64: MPI.INT64_T,
    DType.FLOAT32: MPI.FLOAT,
    DType.FLOAT64: MPI.DOUBLE,
    DType.COMPLEX64: MPI.C_FLOAT_COMPLEX,
    DType.COMPLEX128: MPI.C_DOUBLE_COMPLEX,
}

MPI_OPS: dict[ReduceOp, MPI.Op] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}


def memory(buffer: Buffer) -> MPI.buffer:
    """Return the memory of a buffer as MPI's buffer object."""
    return MPI.buffer.fromaddress(buffer.pointer, buffer.nbytes)


def typed(buffer: Buffer) -> list[object]:
    """Return the [memory, count, datatype] of a buffer for a reduction."""
    return [memory(buffer), buffer.count, MPI_TYPES[buffer.dtype]]
