"""The communicator of the gloo and nccl engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator, Pending
from hvdtrain.engines.torch_groups import Members, gloo_group, nccl_group
from hvdtrain.engines.torch_types import (
    BOOL_OPS,
    OPS,
    WIDE,
    bytes_of,
    capabilities,
    elements_of,
    multiply,
)
from hvdtrain.errors import ConnectionLostError
from hvdtrain.types import DType, ReduceOp

__all__ = ["TorchCommunicator"]

_WIDE_ELEMENTS = 16 << 20  # that are widened at a time

_SIGN = -(1 << 63)  # turned over, it keeps the order when unsigned bits are read as signed


class TorchCommunicator(Communicator):
    """One gloo group, which also carries the control messages, and for nccl one NCCL group."""

    def __init__(self, members: Members) -> None:
        self.rank = members.rank
        self.size = members.size
        self.capabilities = capabilities(members.cuda)
        self._members: Members | None = members
        self._abort = members.abort
        self._splits = 0
        with self._peers("connect"):
            self._gloo: Any = gloo_group(members)
            self._nccl: Any = nccl_group(members) if members.cuda else None

    def start_max(self, values: npt.NDArray[np.uint64]) -> _TorchPending:
        signed = values.view(np.int64)
        signed ^= _SIGN
        work = self._gloo.allreduce([torch.from_numpy(signed)], _options(dist.ReduceOp.MAX))
        return _TorchPending(self, work, signed)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        tensor = elements_of(buffer)
        if buffer.dtype in (DType.BOOL, DType.UINT64):
            multiply(tensor, prescale)
            self._reduce_bits(tensor, op)
            multiply(tensor, postscale)
        else:
            pieces = torch.split(tensor, _WIDE_ELEMENTS) if tensor.dtype in WIDE else (tensor,)
            for piece in pieces:
                wide = piece.to(WIDE.get(piece.dtype, piece.dtype))
                multiply(wide, prescale)
                self._reduce(wide, OPS[op])
                multiply(wide, postscale)
                if wide is not piece:
                    piece.copy_(wide)
        self._synchronize(tensor)

    def _reduce_bits(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Reduce bool as bytes, and uint64 as signed numbers."""
        if tensor.dtype == torch.bool:
            self._reduce(tensor.view(torch.uint8), BOOL_OPS[op])
            return
        signed = tensor.view(torch.int64)
        ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
        if ordered:
            signed.bitwise_xor_(_SIGN)
        self._reduce(signed, OPS[op])
        if ordered:
            signed.bitwise_xor_(_SIGN)

    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        if tensor.numel():
            with self._peers("allreduce"):
                self._group(tensor).allreduce([tensor], _options(op)).wait()
            self._synchronize(tensor)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        memory = bytes_of(buffer)
        if memory.numel():
            with self._peers("broadcast"):
                self._start_broadcast(memory, root_rank).wait()
            self._synchronize(memory)

    def _start_broadcast(self, memory: torch.Tensor, root_rank: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root_rank, 0
        work: dist.Work = self._group(memory).broadcast([memory], options)
        return work

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        # Neither backend gathers uneven parts; broadcasts of all of them run side by side.
        itemsize = send.dtype.itemsize
        parts = torch.split(bytes_of(receive), [count * itemsize for count in counts])
        parts[self.rank].copy_(bytes_of(send))
        with self._peers("allgather"):
            works = [
                self._start_broadcast(part, root_rank)
                for root_rank, part in enumerate(parts)
                if part.numel()
            ]
            for work in works:
                work.wait()
        self._synchronize(*parts)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        outgoing, incoming = bytes_of(send), bytes_of(receive)
        itemsize = send.dtype.itemsize
        with self._peers("alltoall"):
            work = self._group(incoming).alltoall_base(
                incoming,
                outgoing,
                [count * itemsize for count in receive_counts],
                [count * itemsize for count in send_counts],
                dist.AllToAllOptions(),
            )
            work.wait()
        self._synchronize(incoming)

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        # Neither backend scatters uneven parts.
        whole = elements_of(send).clone()
        scratch = Buffer(whole.data_ptr(), send.dtype, send.count, send.device, whole)
        self.allreduce(scratch, op, prescale, postscale)
        start = [0, *accumulate(counts)][self.rank]
        own = elements_of(receive)
        own.copy_(whole[start : start + counts[self.rank]])
        self._synchronize(own)

    def barrier(self) -> None:
        with self._peers("barrier"):
            self._gloo.barrier(dist.BarrierOptions()).wait()

    def split(self, ranks: Sequence[int]) -> TorchCommunicator | None:
        if self._members is None:
            raise ValueError("this communicator is closed")
        self._splits += 1
        if self.rank not in ranks:
            return None
        members = replace(
            self._members,
            store=dist.PrefixStore(f"split {self._splits}", self._members.store),
            rank=list(ranks).index(self.rank),
            size=len(ranks),
            leave=_nothing,
        )
        return TorchCommunicator(members)

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)

    def close(self) -> None:
        if self._members is None:
            return
        if self._nccl is not None:
            self._nccl.shutdown()
        self._gloo = self._nccl = None
        leave, self._members = self._members.leave, None
        leave()

    def abort(self, code: int) -> None:
        self._abort(code)

    def _group(self, tensor: torch.Tensor) -> Any:
        return self._nccl if tensor.is_cuda else self._gloo

    def _synchronize(self, *tensors: torch.Tensor) -> None:
        """Wait for the GPU: the caller may read the memory from any stream."""
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream().synchronize()

    @contextmanager
    def _peers(self, operation: str) -> Iterator[None]:
        """Say of an error of the network what it means here."""
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". This is typically")[0]
            reason = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", reason)  # where in gloo's source
            raise ConnectionLostError(
                f"[rank {self.rank}/{self.size}] {operation}: the connection to another rank "
                f"failed ({reason}). Look at what that rank printed last"
            ) from None


class _TorchPending(Pending):
    def __init__(
        self, communicator: TorchCommunicator, work: dist.Work, signed: npt.NDArray[np.int64]
    ) -> None:
        self._communicator = communicator
        self._work: dist.Work | None = work
        self._signed = signed

    def test(self) -> bool:
        if self._work is None:
            return True
        if not self._work.is_completed():
            return False
        with self._communicator._peers("agreement"):
            self._work.wait()
        self._work = None
        self._signed ^= _SIGN
        return True


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _nothing() -> None:
    pass
