"""Blocking collective operations on numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.agreement.request import UNNAMED
from hvdtrain.core.arguments import op_on_wire
from hvdtrain.core.arrays.memory import as_buffer, empty, from_buffer, to_wire
from hvdtrain.core.collectives.allreduce import PreparedAllreduce
from hvdtrain.core.collectives.gathers import rows_of_rank
from hvdtrain.core.process_set import ProcessSet, channel_of, require_process_set
from hvdtrain.types import ReduceOp

# Programs that give each call another name must not fill the memory.
_MOST_PLANS = 2048

# Name, reduction, factors, process set, dtype and shape; marked, because torch keeps others.
Key: TypeAlias = tuple[
    str, str | None, ReduceOp, float, float, ProcessSet, np.dtype[Any], tuple[int, ...]
]


def _keep_plan(key: Key, sent: HostArray, wire_op: ReduceOp, kind: str) -> None:
    _, name, _, prescale, postscale, process_set, *_ = key
    plans, channel = context.current().plans, channel_of(process_set)
    if len(plans) >= _MOST_PLANS or not sent.size:
        return
    prepared = PreparedAllreduce(
        channel.communicator,
        sent,
        sent.shape,
        wire_op,
        str(name) if name else f"{UNNAMED}0",
        prescale,
        postscale,
        as_buffer,
        _address,
        None if name else partial(channel.name, "allreduce", None),
        kind,
    )
    plans[key] = channel, prepared


def _address(array: HostArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


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
    plan = key = None
    if len(arrays) == 1:
        members = require_process_set(process_set)
        key = ("array", name, op, *factors, members, arrays[0].dtype, arrays[0].shape)
        plan = context.current().plans.get(key)
        if plan is not None:
            channel, prepared = plan
            if operations.run_prepared(channel, prepared, (wire[0], results[0])):
                return [_from_wire(results[0], arrays[0])]
    wire_op, kinds = op_on_wire([array.dtype.name for array in arrays], op, *factors)
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
    if key is not None and plan is None:
        _keep_plan(key, wire[0], wire_op, kinds[0])
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
