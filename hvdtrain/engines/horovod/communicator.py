"""The communicator of the horovod engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.engines.communicator import Capabilities, Communicator, Pending
from hvdtrain.engines.horovod.calls import HorovodCalls, HorovodProcess
from hvdtrain.engines.horovod.memory import (
    elements,
    even_rows,
    starts,
    word_counts,
    words,
)
from hvdtrain.engines.horovod.types import NATIVE, REDUCES, reducible_tensor, widening
from hvdtrain.errors import HvdtrainError, UnsupportedError
from hvdtrain.types import DType, ReduceOp

_MOST_WORDS = 2**31 - 1
_HIGHEST_BIT = np.uint64(1 << 63)


class HorovodCommunicator(Communicator):
    """A communicator on one of Horovod's process sets, with unique operation names."""

    capabilities = Capabilities(
        reduces=REDUCES,
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
        self._calls = HorovodCalls(process.hvd, process.sets[tuple(sorted(ranks))], name)
        self._splits = 0
        # This communicator's ranks in the order of their Horovod ranks.
        self._order = sorted(range(len(ranks)), key=self._ranks.__getitem__)
        self._in_order = self._order == list(range(len(ranks)))
        self.rank = self._ranks.index(self._hvd.rank())
        self.size = len(ranks)

    def start_max(self, values: npt.NDArray[np.uint64]) -> _HorovodPending:
        # Horovod has no uint64; with the highest bit flipped, the order is that of int64.
        numbers = (values ^ _HIGHEST_BIT).view(np.int64)
        tensor = torch.from_numpy(numbers)
        handle = self._calls.start("allreduce_async_", tensor, op=self._hvd.Max)
        return _HorovodPending(self._calls, handle, numbers, values)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        for piece in buffer.pieces(self._chunk_bytes // widening(buffer.dtype, op)):
            _scale(piece, prescale)  # Horovod's own factor must be the same on all ranks
            with reducible_tensor(piece, op) as tensor:
                self._calls.run("allreduce_async_", tensor, op=self._reduction(op))
            _scale(piece, postscale)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        for piece in buffer.pieces(self._chunk_bytes):
            self._calls.run("broadcast_async_", words(piece), root_rank=self._ranks[root_rank])

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        if receive.nbytes > self._chunk_bytes:
            self._allgather_by_broadcasts(send, receive, counts)
        elif receive.count:
            gathered = self._calls.run("allgather_async", words(send))
            self._put_in_order(gathered, receive, counts)

    def _allgather_by_broadcasts(
        self, send: Buffer, receive: Buffer, counts: Sequence[int]
    ) -> None:
        for root_rank, start in enumerate(starts(counts)):
            part = receive.slice(start, counts[root_rank])
            if root_rank == self.rank:
                words(part).copy_(words(send))
            self.broadcast(part, root_rank)

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
        arrived, _ = self._calls.run("alltoall_async", outgoing, splits=splits)
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
            result = self._calls.run("reducescatter_async", table, op=self._hvd.Sum).view(-1)
        else:
            # Horovod only scatters evenly, only sums, and few types: reduce all, keep one part.
            copy = Buffer.from_array(send.array().copy(), send.dtype)
            self.allreduce(copy, op, prescale)
            result = elements(copy.slice(starts(counts)[self.rank], counts[self.rank]))
        elements(receive).copy_(result)
        _scale(receive, postscale)

    def barrier(self) -> None:
        # Horovod's barrier has one name for all communicators of a process set.
        self._calls.run("allreduce_async_", torch.zeros(1, device="cpu"), op=self._hvd.Sum)

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
            self._process.sets[key] = self._add_process_set(key)
        if self.rank not in ranks:
            return None
        return HorovodCommunicator(self._process, members, name, self._chunk_bytes)

    def _add_process_set(self, ranks: Sequence[int]) -> object:
        try:
            return self._hvd.add_process_set(list(ranks))
        except ValueError as error:
            raise HvdtrainError(f"engine horovod: {error}") from error

    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        self._require(device)
        return np.empty(nbytes, np.uint8)

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

    def _reduction(self, op: ReduceOp) -> int:
        reduction: int = getattr(self._hvd, op.value.capitalize())
        return reduction


class _HorovodPending(Pending):
    def __init__(
        self,
        calls: HorovodCalls,
        handle: int,
        numbers: npt.NDArray[np.int64],
        values: npt.NDArray[np.uint64],
    ) -> None:
        self._calls = calls
        self._handle = handle
        self._numbers = numbers
        self._values = values
        self._done = False

    def test(self) -> bool:
        if not self._done and self._calls.is_done(self._handle):
            self._calls.finish(self._handle)
            self._values[:] = self._numbers.view(np.uint64) ^ _HIGHEST_BIT
            self._done = True
        return self._done


def _scale(buffer: Buffer, factor: float) -> None:
    if buffer.dtype is DType.FLOAT16 and factor != 1.0:
        elements(buffer).mul_(factor)
    else:
        buffer.scale(factor)
