"""Blocking collective operations on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.agreement.channel import Submission
from hvdtrain.core.arguments import op_on_wire
from hvdtrain.core.arrays.memory import as_buffer, empty, from_buffer, to_wire
from hvdtrain.core.collectives.allreduce import (
    PLANS,
    AllreducePlan,
    PlannedAllreduce,
    keep_plan,
)
from hvdtrain.core.collectives.gathers import rows_of_rank
from hvdtrain.core.process_set import ProcessSet, channel_of, require_process_set
from hvdtrain.types import ReduceOp


@collective
def allreduce(
    arrays: Sequence[HostArray],
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[HostArray]:
    """Reduce a group of arrays into new memory."""
    factors = (prescale_factor, postscale_factor)
    wire = [to_wire(array) for array in arrays]
    # An array that is sent without conversion belongs to TensorFlow and is not written to.
    results = [
        empty(sent.shape, sent.dtype) if np.may_share_memory(sent, array) else sent
        for array, sent in zip(arrays, wire, strict=True)
    ]
    buffers = [as_buffer(result) for result in results]
    sources = [
        buffer if sent is result else as_buffer(sent)
        for sent, result, buffer in zip(wire, results, buffers, strict=True)
    ]
    members, channel = require_process_set(process_set), channel_of(process_set)
    # Marked, because torch keeps others.
    kinds = tuple((array.dtype, array.shape) for array in arrays)
    key = ("arrays", name, op, *factors, members, kinds)
    plan: AllreducePlan | None = PLANS.get(key)
    if plan is None:
        wire_op, types = op_on_wire([array.dtype.name for array in arrays], op, *factors)
        full, shapes = channel.name("allreduce", name), [array.shape for array in arrays]
        plan = operations.plan_allreduce(channel, buffers, shapes, wire_op, full, *factors, types)
        if len(arrays) == 1:
            keep_plan(plan, channel, key)
    else:
        full = channel.name("allreduce", name)
    Submission(channel, PlannedAllreduce(plan, full, sources, buffers)).run()
    return [_from_wire(result, array) for result, array in zip(results, arrays, strict=True)]


@collective
def reducescatter(
    arrays: Sequence[HostArray],
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[HostArray]:
    """Reduce a group of contiguous arrays [rows, ...] and return this rank's rows of each."""
    factors = (prescale_factor, postscale_factor)
    wire_op, kinds = op_on_wire([array.dtype.name for array in arrays], op, *factors)
    wire = [to_wire(array) for array in arrays]
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
        results.append(_from_wire(from_buffer(buffer, sent.dtype, shape), array))
    return results


@collective
def allgather(
    arrays: Sequence[HostArray], name: str | None, process_set: ProcessSet
) -> list[tuple[HostArray, list[int]]]:
    """Concatenate each array [rows, ...] of a group over the ranks; a 0-d array is one row."""
    rows = [np.atleast_1d(array) for array in arrays]
    gathered = operations.allgather(
        channel_of(process_set), [as_buffer(array) for array in rows], [a.shape for a in rows], name
    ).run()
    return [
        (from_buffer(buffer, array.dtype, (sum(counts), *array.shape[1:])), counts)
        for array, (buffer, counts) in zip(rows, gathered, strict=True)
    ]


@collective
def broadcast(
    arrays: Sequence[HostArray],
    root_rank: int,
    names: Sequence[str | None],
    process_set: ProcessSet,
) -> list[HostArray]:
    """Return the arrays of one rank on every rank, in new memory."""
    results = [empty(array.shape, array.dtype) for array in arrays]
    channel, waits = channel_of(process_set), []
    for array, result, name in zip(arrays, results, names, strict=True):
        result[...] = array
        buffer = as_buffer(result)
        waits.append(operations.broadcast(channel, buffer, array.shape, root_rank, name).start())
    for wait in waits:
        wait.wait()
    return results


@collective
def alltoall(
    array: HostArray, splits: HostArray | None, name: str | None, process_set: ProcessSet
) -> tuple[HostArray, HostArray]:
    """Send rows to every rank; return those received, and their numbers by rank, int32 [size]."""
    counts = None
    if splits is not None:
        if splits.ndim != 1 or splits.dtype.kind not in "iu":
            raise ValueError(f"splits must be a 1-d array of integers, got {splits}")
        counts = [int(count) for count in splits]
    buffer, received = operations.alltoall(
        channel_of(process_set), as_buffer(array), array.shape, counts, name
    ).run()
    rows = from_buffer(buffer, array.dtype, (sum(received), *array.shape[1:]))
    return rows, np.array(received, np.int32)


def _from_wire(result: HostArray, array: HostArray) -> HostArray:
    if array.dtype == np.bool_:
        return result.view(np.bool_)
    return result.astype(array.dtype, copy=False)
