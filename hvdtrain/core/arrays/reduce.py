"""Allreduce and reducescatter of numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.core import operations
from hvdtrain.core.arguments import op_on_wire
from hvdtrain.core.arrays.memory import Array, as_buffer, empty, from_buffer, wire_type
from hvdtrain.core.collectives.reducescatter import rows_of_rank
from hvdtrain.core.process_set import ProcessSet, channel_of
from hvdtrain.types import ReduceOp

__all__ = ["allreduce", "reducescatter"]


def allreduce(
    arrays: Sequence[Array],
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[Array]:
    """Return the reduced arrays of a group in new memory (collective, blocking).

    Args:
        arrays: arrays of this rank, with equal shapes and dtypes on all ranks.
        op: reduction.
        name: name of the operation, equal on all ranks; numbered if it is None.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        process_set: ranks that take part.
    """
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([array.dtype.name for array in arrays], op, *factors)
    wire = [_on_the_wire(array) for array in arrays]
    # An array that needs no conversion belongs to TensorFlow and must not be modified.
    results = [
        empty(sent.shape, sent.dtype) if np.may_share_memory(sent, array) else sent
        for array, sent in zip(arrays, wire, strict=True)
    ]
    sources, buffers = [as_buffer(a) for a in wire], [as_buffer(a) for a in results]
    operations.allreduce(
        channel_of(process_set),
        buffers,
        [array.shape for array in arrays],
        wire_op,
        name,
        *factors,
        kinds,
        [
            buffer if sent is result else source
            for sent, result, source, buffer in zip(wire, results, sources, buffers, strict=True)
        ],
    ).run()
    return [_off_the_wire(result, array) for result, array in zip(results, arrays, strict=True)]


def reducescatter(
    arrays: Sequence[Array],
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[Array]:
    """Return this rank's parts of the reduced arrays of a group (collective, blocking).

    Args:
        arrays: arrays of this rank, with equal shapes and dtypes on all ranks.
        op: reduction.
        name: name of the operation, equal on all ranks; numbered if it is None.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        process_set: ranks that take part.
    """
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([array.dtype.name for array in arrays], op, *factors)
    wire = [_on_the_wire(array) for array in arrays]
    buffers = operations.reducescatter(
        channel_of(process_set),
        [as_buffer(sent) for sent in wire],
        [array.shape for array in arrays],
        wire_op,
        name,
        *factors,
        kinds,
    ).run()
    size, rank = process_set.size() or 1, process_set.rank() or 0
    results = []
    for array, sent, buffer in zip(arrays, wire, buffers, strict=True):
        shape = (rows_of_rank(array.shape[0], rank, size), *array.shape[1:])
        results.append(_off_the_wire(from_buffer(buffer, sent.dtype, shape), array))
    return results


def _on_the_wire(array: Array) -> Array:
    if array.dtype == np.bool_:
        return array.view(np.uint8)
    wire = wire_type(array.dtype)
    return array if wire == array.dtype else array.astype(wire)


def _off_the_wire(result: Array, array: Array) -> Array:
    if array.dtype == np.bool_:
        return result.view(np.bool_)
    return result.astype(array.dtype, copy=False)
