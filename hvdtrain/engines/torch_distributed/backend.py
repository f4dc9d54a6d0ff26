"""One process group, of gloo or of NCCL, and what it leaves to us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.engines.torch_distributed.types import BOOL_OPS, OPS, Widths, multiply
from hvdtrain.types import ReduceOp

__all__ = ["Backend"]

_WIDE_ELEMENTS = 16 << 20  # that are widened at a time

_SIGN = -(1 << 63)  # turned over, it keeps the order when unsigned bits are read as signed


@dataclass(frozen=True)
class Backend:
    """What moves tensors of one kind of memory.

    On a GPU all of it is put on the caller's current stream, and the host waits for nothing.

    Attributes:
        group: of torch.distributed.
        wide: in which types it adds others.
        premultiplied: makes a sum of elements that are multiplied on the way; None where the
            library has none.
        even: whether it gathers and scatters equal parts in one call.
    """

    group: Any
    wide: Widths
    premultiplied: Callable[[float], Any] | None = None
    even: bool = False

    # A program's tensors may be inference tensors, which nobody else writes into.
    @torch.inference_mode()
    def allreduce(
        self, tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """Reduce elements in place; see Communicator.allreduce."""
        if tensor.dtype in (torch.bool, torch.uint64):
            multiply(tensor, prescale)
            self._reduce_bits(tensor, op)
            multiply(tensor, postscale)
        elif tensor.dtype in self.wide:
            for piece in torch.split(tensor, _WIDE_ELEMENTS):
                wide = piece.to(self.wide[piece.dtype])
                self._reduce_numbers(wide, op, prescale, postscale)
                piece.copy_(wide)
        else:
            self._reduce_numbers(tensor, op, prescale, postscale)

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

    def _reduce_numbers(
        self, tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        before, reduction, after = self._factors(tensor.dtype, op, prescale, postscale)
        multiply(tensor, before)
        self._reduce(tensor, reduction)
        multiply(tensor, after)

    def _factors(
        self, dtype: torch.dtype, op: ReduceOp, prescale: float, postscale: float
    ) -> tuple[float, Any, float]:
        """Return the factor before a reduction, the reduction, and the factor after it."""
        fractional = dtype.is_floating_point or dtype.is_complex
        # NCCL 2.28 forgets the factor in some elements where one rank is alone.
        premultiplied = self.premultiplied if self.group.size() > 1 else None
        if premultiplied is None or op is not ReduceOp.SUM or not fractional:
            return prescale, OPS[op], postscale
        # In a half type, the factor would be rounded, and all elements with it. And before the
        # sum, because the largest half is not far away.
        if dtype.itemsize == 2:
            return prescale * postscale, OPS[op], 1.0
        # Ranks must agree on the reduction, and postscale is what all of them have alike.
        if postscale == 1.0:
            return prescale, OPS[op], 1.0
        return 1.0, premultiplied(prescale * postscale), 1.0

    def _reduce(self, tensor: torch.Tensor, reduction: Any) -> None:
        if tensor.numel():
            options = dist.AllreduceOptions()
            options.reduceOp = reduction
            self.group.allreduce([tensor], options).wait()

    def broadcast(self, memory: torch.Tensor, root_rank: int) -> None:
        """Overwrite bytes with those of a rank."""
        if memory.numel():
            self._start_broadcast(memory, root_rank).wait()

    def _start_broadcast(self, memory: torch.Tensor, root_rank: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root_rank, 0
        work: dist.Work = self.group.broadcast([memory], options)
        return work

    @torch.inference_mode()
    def allgather(self, send: torch.Tensor, receive: torch.Tensor, sizes: Sequence[int]) -> None:
        """Concatenate everybody's bytes by rank."""
        if self.even and len(set(sizes)) == 1 and sizes[0]:
            self.group._allgather_base(receive, send).wait()
            return
        # Neither library gathers uneven parts; broadcasts of all of them run side by side.
        parts = torch.split(receive, list(sizes))
        parts[self.group.rank()].copy_(send)
        works = [
            self._start_broadcast(part, root_rank)
            for root_rank, part in enumerate(parts)
            if part.numel()
        ]
        for work in works:
            work.wait()

    def alltoall(
        self,
        send: torch.Tensor,
        receive: torch.Tensor,
        send_sizes: list[int],
        receive_sizes: list[int],
    ) -> None:
        """Send parts of the bytes to all ranks."""
        options = dist.AllToAllOptions()
        self.group.alltoall_base(receive, send, receive_sizes, send_sizes, options).wait()

    @torch.inference_mode()
    def reduce_scatter(
        self,
        send: torch.Tensor,
        receive: torch.Tensor,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce elements and keep this rank's part; see Communicator.reduce_scatter."""
        native = send.dtype not in (torch.bool, torch.uint64) and send.dtype not in self.wide
        if self.even and native and len(set(counts)) == 1 and counts[0]:
            self._reduce_scatter_evenly(send, receive, op, prescale, postscale)
            return
        # Neither library scatters uneven parts.
        whole = send.clone()
        self.allreduce(whole, op, prescale, postscale)
        receive.copy_(torch.split(whole, list(counts))[self.group.rank()])

    def _reduce_scatter_evenly(
        self,
        send: torch.Tensor,
        receive: torch.Tensor,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        before, reduction, after = self._factors(send.dtype, op, prescale, postscale)
        if before != 1.0:
            send = send.clone()
            multiply(send, before)
        options = dist.ReduceScatterOptions()
        options.reduceOp = reduction
        self.group._reduce_scatter_base(_real(receive), _real(send), options).wait()
        multiply(receive, after)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers, of which only sums come here, as their parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
