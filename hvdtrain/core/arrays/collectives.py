"""Numpy arrays as buffers, in memory aligned for TensorFlow, and blocking operations on them."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.arrays import HostArray
from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.agreement.channel import KNOWN_CALLS, Channel, Submission, keep_call
from hvdtrain.core.allocators import (
    LEAST_BYTES,
    FindLibrary,
    GradientArena,
    blocks_for,
    open_places,
    suitable_slices,
)
from hvdtrain.core.allreduce import AllreduceTemplate, TemplateAllreduce
from hvdtrain.core.bucket_plans import placed_buckets
from hvdtrain.core.gathers import rows_of_rank
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.operations import op_on_wire
from hvdtrain.core.places import GradientPlaces, LentBucket
from hvdtrain.core.process_set import ProcessSet, channel_of, require_process_set
from hvdtrain.types import DType, ReduceOp

# TensorFlow makes a tensor of an array without a copy if its address is a multiple of this; kernels
# read fastest there, too.
ALIGNMENT_BYTES = 64
_WIRE_TYPES = {"float16": np.float32, "bfloat16": np.float32, "bool": np.uint8}


class Lending:
    """Finds gradients of a plan that lie in memory of the node (all local)."""

    def __init__(self, arena: GradientArena, places: GradientPlaces, plan: BucketPlan) -> None:
        self._arena, self._places, self._plan = arena, places, plan

    def buckets(self, buffers: Sequence[Buffer]) -> list[LentBucket | None]:
        """Return each bucket for a step; None for those of small gradients."""
        base = self._places.offset(buffers[0])
        make = partial(LentBucket, self._places, base)
        return placed_buckets(self._plan, buffers, make)

    def lend(self, bucket: LentBucket | None, index: int, array: HostArray) -> bool:
        """Let other ranks read a gradient where it lies; return whether they can."""
        spec = self._plan.specs[index]
        if bucket is None or spec.nbytes < LEAST_BYTES:
            return False
        if array.dtype != spec.dtype.numpy or not array.flags.c_contiguous:
            return False
        address = array.ctypes.data
        offset = self._arena.offset(address)
        if offset is None:
            self._arena.miss(address)
            return False
        if offset % ALIGNMENT_BYTES:
            return False
        bucket.lend(index, address, offset)
        return True


@collective
def open_lending(
    channel: Channel, plan: BucketPlan, memory: Elements, find: FindLibrary, name: str
) -> Lending | None:
    """Let a framework allocate gradients in memory of the node, if all ranks can."""
    if suitable_slices(channel, memory) is None:
        return None
    sizes = [spec.nbytes for spec in plan.specs if spec.dtype.value == spec.kind]
    blocks = blocks_for(sizes)
    opened = open_places(channel, memory, blocks, len(plan.specs), find, name)
    return None if opened is None else Lending(*opened, plan)


def as_buffer(array: HostArray) -> Buffer:
    """View a contiguous array as a buffer, which keeps its memory alive."""
    try:
        dtype = DType(array.dtype.name)
    except ValueError:
        raise TypeError(f"tensors of {array.dtype.name} cannot be communicated") from None
    return Buffer.from_array(array, dtype)


def from_buffer(buffer: Buffer, dtype: np.dtype[Any], shape: Sequence[int]) -> HostArray:
    return buffer.array().view(dtype).reshape(shape)


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> HostArray:
    """Return an uninitialized array that TensorFlow can use without a copy."""
    element = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes].view(element).reshape(shape)


def wire_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which elements are reduced: float32 for half types, uint8 for bool."""
    return np.dtype(_WIRE_TYPES.get(dtype.name, dtype))


def aligned_order(sizes: Sequence[int]) -> list[int]:
    """Return the arrays' reverse order in memory, but odd sizes last, so that all others align."""
    aligned = [size % ALIGNMENT_BYTES == 0 for size in sizes]
    return sorted(range(len(sizes)), key=aligned.__getitem__)[::-1]


def to_wire(array: HostArray) -> HostArray:
    """Return the elements in the type in which they are reduced, without a copy if possible."""
    if array.dtype == np.bool_:
        return array.view(np.uint8)
    wire = wire_type(array.dtype)
    return array if wire == array.dtype else array.astype(wire)


class MemoryPool:
    """Blocks of equal size, each reused when no array or tensor refers to it any more.

    Any thread may allocate. The first free block is taken, so that the first block is used most.
    Blocks that are not `given` are allocated when all are in use.
    """

    def __init__(self, *given: HostArray) -> None:
        self._lock = threading.Lock()
        self._given = {block.ctypes.data for block in given}
        self._blocks = list(given)
        self._users: list[weakref.ref[object] | None] = [None] * len(given)

    def allocate(self) -> HostArray:
        """Return a free block, uint8 [nbytes]; it is in use as long as views of it exist."""
        with self._lock:
            number = self._free_block()
            block = self._blocks[number]
            memory = (ctypes.c_byte * block.size).from_address(block.ctypes.data)
            memory.owner = block  # type: ignore[attr-defined]  # lives as long as its views
            self._users[number] = weakref.ref(memory)
        return np.frombuffer(memoryview(memory), np.uint8)

    def is_given(self, block: HostArray) -> bool:
        """Return whether allocate() has returned one of the first blocks."""
        return block.ctypes.data in self._given

    def _free_block(self) -> int:
        """Return the index of a free block; the lock must be held."""
        for number, user in enumerate(self._users):
            if user is None or user() is None:
                return number
        self._blocks.append(empty(self._blocks[0].shape, np.uint8))
        self._users.append(None)
        return len(self._blocks) - 1


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
    template: AllreduceTemplate | None = KNOWN_CALLS.get(key)
    if template is None:
        wire_op, types = op_on_wire([array.dtype.name for array in arrays], op, *factors)
        full, shapes = channel.name("allreduce", name), [array.shape for array in arrays]
        terms = shapes, wire_op, full, *factors, types
        template = operations.make_template(channel, buffers, *terms)
        if len(arrays) == 1:
            keep_call(template, channel, key)
    else:
        full = channel.name("allreduce", name)
    Submission(channel, TemplateAllreduce(template, full, sources, buffers)).run()
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
