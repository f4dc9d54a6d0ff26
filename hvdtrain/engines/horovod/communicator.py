"""The communicator of the horovod engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import REDUCES_REAL, Capabilities, Communicator, Pending
from hvdtrain.engines.float_order import flip_highest, from_ordered, is_ordered, to_ordered
from hvdtrain.errors import HvdtrainError, UnsupportedError
from hvdtrain.types import DType, ReduceOp

# Integer types of each element width, for moving data of any type.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def elements(buffer: Buffer) -> torch.Tensor:
    """View the elements as a 1-d tensor of their dtype."""
    return _view(buffer, getattr(torch, buffer.dtype.value))


def words(buffer: Buffer) -> torch.Tensor:
    """View the memory as a 1-d integer tensor of the elements' width, at most 8 bytes."""
    return _view(buffer, _WORDS[_width(buffer.dtype)])


def word_counts(dtype: DType, counts: Sequence[int]) -> list[int]:
    """Return the numbers of words that numbers of elements correspond to."""
    factor = dtype.itemsize // _width(dtype)
    return [count * factor for count in counts]


def even_rows(counts: Sequence[int]) -> int:
    """Return the number of rows with which Horovod's reducescatter yields these counts, or 0.

    It distributes rows as evenly as possible, and the first ranks get the larger parts.
    """
    row = gcd(*counts)
    if row == 0:
        return 0
    rows, size = sum(counts) // row, len(counts)
    distributed = [rows // size + (rank < rows % size) for rank in range(size)]
    return rows if [part * row for part in distributed] == list(counts) else 0


def _view(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer.array(), dtype=dtype)


def _width(dtype: DType) -> int:
    return min(dtype.itemsize, max(_WORDS))


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


def _widths(op: ReduceOp) -> Mapping[DType, DType]:
    return _WIDER_ORDERED if op in (ReduceOp.MIN, ReduceOp.MAX) else _WIDER


@contextmanager
def reducible_tensor(buffer: Buffer, op: ReduceOp) -> Iterator[torch.Tensor]:
    """Return a context with a tensor for Horovod to reduce; `buffer` gets the result, wrapped."""
    tensor = elements(buffer)
    if buffer.dtype is DType.UINT64:
        signed = words(buffer)
        flip_highest(signed, op)
        yield signed
        flip_highest(signed, op)
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


@dataclass
class HorovodProcess:
    """Horovod as this process has initialized it; shared by all of its communicators."""

    hvd: Any
    abort: Callable[[int], None]
    sets: dict[tuple[int, ...], Any]


_MOST_WORDS = 2**31 - 1


class HorovodCommunicator(Communicator):
    """A communicator on one of Horovod's process sets.

    Horovod matches operations by name. Members number theirs identically, because they call them in
    the same order, and the prefix, the communicator's name, is unique.
    """

    capabilities = Capabilities(
        reduces=REDUCES_REAL,
        moves=frozenset(DType),
        devices=frozenset({"cpu"}),
        concurrent=True,
    )

    def __init__(
        self,
        process: HorovodProcess,
        ranks: Sequence[int],
        name: str,
        chunk_bytes: int,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._process = process
        self._hvd = process.hvd
        self._ranks = list(ranks)
        self._name = name
        self._chunk_bytes = chunk_bytes
        self._leave = leave
        self._set = process.sets[tuple(sorted(ranks))]
        self._operations = self._splits = 0
        # This communicator's ranks in the order of their Horovod ranks.
        self._order = sorted(range(len(ranks)), key=self._ranks.__getitem__)
        self._in_order = self._order == list(range(len(ranks)))
        self.rank = self._ranks.index(self._hvd.rank())
        self.size = len(ranks)

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        # Horovod has no uint64; with the highest bit flipped, the order is that of int64.
        signed = values.view(np.int64)
        flip_highest(signed, ReduceOp.MAX)
        handle = self._start("allreduce_async_", torch.from_numpy(signed), op=self._hvd.Max)

        def end() -> None:
            self._call("synchronize", handle)
            flip_highest(signed, ReduceOp.MAX)

        return Pending(lambda: self._call("poll", handle), end)

    def _start(self, operation: str, tensor: torch.Tensor, **how: object) -> int:
        """Call an asynchronous operation of horovod.torch and return its handle."""
        name = f"{self._name}:{self._operations}"
        self._operations += 1
        handle: int = self._call(operation, tensor, name=name, process_set=self._set, **how)
        return handle

    def _run(self, operation: str, tensor: torch.Tensor, **how: object) -> Any:
        return self._call("synchronize", self._start(operation, tensor, **how))

    def _call(self, function: str, *arguments: object, **how: object) -> Any:
        try:
            return getattr(self._hvd, function)(*arguments, **how)
        except self._hvd.HorovodInternalError as error:
            raise HvdtrainError(f"engine horovod: {error}") from error

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        dtype, reduction = buffer.dtype, getattr(self._hvd, op.value.capitalize())
        growth = _widths(op).get(dtype, dtype).itemsize // dtype.itemsize
        for piece in buffer.pieces(self._chunk_bytes // growth):
            _scale(piece, prescale)  # Horovod's own factor must be the same on all ranks
            with reducible_tensor(piece, op) as tensor:
                self._run("allreduce_async_", tensor, op=reduction)
            _scale(piece, postscale)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        for piece in buffer.pieces(self._chunk_bytes):
            self._run("broadcast_async_", words(piece), root_rank=self._ranks[root_rank])

    @collective
    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        if receive.nbytes > self._chunk_bytes:
            self._allgather_by_broadcasts(send, receive, counts)
        elif receive.count:
            gathered = self._run("allgather_async", words(send))
            self._put_in_order(gathered, receive, counts)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        outgoing = words(send)
        if max(outgoing.numel(), words(receive).numel()) > _MOST_WORDS:
            raise UnsupportedError(
                f"engine horovod: alltoall of more than {_MOST_WORDS} elements on one rank, "
                "the most it can count: send them in several operations"
            )
        sizes = word_counts(send.dtype, send_counts)
        if not self._in_order:
            parts = torch.split(outgoing, sizes)
            outgoing = torch.cat([parts[rank] for rank in self._order])
        splits = torch.tensor([sizes[k] for k in self._order], dtype=torch.int32, device="cpu")
        arrived, _ = self._run("alltoall_async", outgoing, splits=splits)
        self._put_in_order(arrived, receive, receive_counts)

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        rows = even_rows(counts) if send.dtype in NATIVE and op is ReduceOp.SUM else 0
        if rows and self._in_order and send.nbytes <= self._chunk_bytes:
            if prescale != 1.0:
                send = Buffer.from_array(send.array().copy(), send.dtype)
                _scale(send, prescale)
            table = elements(send).view(rows, -1)
            result = self._run("reducescatter_async", table, op=self._hvd.Sum)
            elements(receive).copy_(result.view(-1))
            _scale(receive, postscale)
        else:  # Horovod only scatters evenly, only sums, and few types
            super().reduce_scatter(send, receive, counts, op, prescale, postscale)

    def barrier(self) -> None:
        # Horovod's barrier has one name for all communicators of a process set.
        self._run("allreduce_async_", torch.zeros(1, device="cpu"), op=self._hvd.Sum)

    def split(self, ranks: Sequence[int]) -> HorovodCommunicator | None:
        members = [self._ranks[rank] for rank in ranks]
        name = f"{self._name}/{self._splits}"
        self._splits += 1
        key = tuple(sorted(members))
        if key not in self._process.sets:
            if self.size != self._hvd.size():
                raise UnsupportedError(
                    f"engine horovod: there is no process set of ranks {list(key)} yet, and only "
                    "all ranks together can make one: add it on every rank of the world first"
                )
            try:
                self._process.sets[key] = self._hvd.add_process_set(list(key))
            except ValueError as error:
                raise HvdtrainError(f"engine horovod: {error}") from error
        if self.rank not in ranks:
            return None
        return HorovodCommunicator(self._process, members, name, self._chunk_bytes)

    def close(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def abort(self, code: int) -> None:
        self._process.abort(code)

    def _put_in_order(self, arrived: torch.Tensor, receive: Buffer, counts: Sequence[int]) -> None:
        sizes = word_counts(receive.dtype, counts)
        places = torch.split(words(receive), sizes)
        parts = torch.split(arrived, [sizes[rank] for rank in self._order])
        for rank, part in zip(self._order, parts, strict=True):
            places[rank].copy_(part)


def _scale(buffer: Buffer, factor: float) -> None:
    if buffer.dtype is DType.FLOAT16 and factor != 1.0:
        elements(buffer).mul_(factor)
    else:
        buffer.scale(factor)
