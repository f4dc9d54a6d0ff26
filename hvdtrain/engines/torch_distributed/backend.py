"""One process group of gloo or NCCL, extended to all types and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.engines.float_order import from_ordered, is_ordered, to_ordered
from hvdtrain.types import DType, ReduceOp

# Wider dtypes in which dtypes are reduced that a library does not support, or not well.
Widths = Mapping[torch.dtype, torch.dtype]

OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
# As bytes, the sum of two True would be 2.
BOOL_OPS = OPS | {
    ReduceOp.SUM: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.MIN,
}
# Neither library supports these, and gloo would round half types at every hop, slowly.
NCCL_WIDE: Widths = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
GLOO_WIDE: Widths = {**NCCL_WIDE, torch.float16: torch.float32, torch.bfloat16: torch.float32}

_COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
_REAL = frozenset(DType) - _COMPLEX

_REDUCES = {
    ReduceOp.SUM: _REAL | _COMPLEX,
    ReduceOp.MIN: _REAL,
    ReduceOp.MAX: _REAL,
    ReduceOp.PRODUCT: _REAL,
}


def capabilities(cuda: bool) -> Capabilities:
    """Return the capabilities of gloo, or with `cuda` of NCCL and gloo together."""
    return Capabilities(
        reduces=_REDUCES,
        moves=frozenset(DType),
        devices=frozenset({"cpu", "cuda"} if cuda else {"cpu"}),
        # NCCL requires that the kernels of concurrent communicators can run on the GPU at once, or
        # are launched in the same order on all ranks. A kernel uses a few of a GPU's many
        # multiprocessors, and each communicator has its own stream; only a program with dozens of
        # busy channels, or with CUDA_DEVICE_MAX_CONNECTIONS=1, could deadlock.
        concurrent=True,
        half_types=cuda,
        rounds_once=not cuda,
    )


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """Return the elements as a 1-d tensor of their dtype over the same memory."""
    elements = buffer.elements()
    if isinstance(elements, torch.Tensor):
        return elements
    # numpy's memory: agreement, objects, and frameworks that use arrays.
    dtype: torch.dtype = getattr(torch, buffer.dtype.value)
    if buffer.count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(elements, dtype=dtype)


def bytes_of(buffer: Buffer) -> torch.Tensor:
    """View a buffer as a 1-d uint8 tensor."""
    return tensor_of(buffer).view(torch.uint8)


def multiply(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied in float64 and truncated."""
    if factor == 1.0:
        return
    if tensor.dtype == torch.bool:
        raise ValueError(f"a factor of {factor} cannot be applied to bool")
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.to(torch.float64) * factor).trunc_())


_WIDE_ELEMENTS = 16 << 20  # number of elements converted to a wider type at a time

_SIGN = -(1 << 63)  # flipping it preserves the order when unsigned bits are read as signed


@dataclass(frozen=True)
class GroupBackend:
    """Collectives on tensors of one kind of memory; see Communicator.

    On a GPU, work is enqueued on the caller's current stream, and the host does not wait.
    """

    group: Any
    wide: Widths
    premultiplied: Callable[[float], Any] | None = None
    even: bool = False

    # A program's tensors may be inference tensors, which can be written in this mode only.
    @torch.inference_mode()
    def allreduce(
        self, tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        if tensor.dtype in (torch.bool, torch.uint64):
            multiply(tensor, prescale)
            self._reduce_bits(tensor, op)
            multiply(tensor, postscale)
        elif (wider := self._wider(op).get(tensor.dtype)) is not None:
            for piece in torch.split(tensor, _WIDE_ELEMENTS):
                wide = piece.to(wider)
                self._reduce_numbers(wide, op, prescale, postscale)
                piece.copy_(wide)
        else:
            self._reduce_numbers(tensor, op, prescale, postscale)

    def _wider(self, op: ReduceOp) -> Widths:
        """Return the wider dtypes for a reduction: no library has 16-bit integers for ordering."""
        return GLOO_WIDE if op in (ReduceOp.MIN, ReduceOp.MAX) else self.wide

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
        buffer = Buffer.of(tensor)
        ordered = to_ordered(buffer, op)
        self._reduce(tensor_of(ordered), reduction)
        from_ordered(ordered, buffer)
        multiply(tensor, after)

    def _factors(
        self, dtype: torch.dtype, op: ReduceOp, prescale: float, postscale: float
    ) -> tuple[float, Any, float]:
        """Return the factor before a reduction, the reduction, and the factor after it."""
        fractional = dtype.is_floating_point or dtype.is_complex
        # With a single rank, NCCL 2.28 does not apply the factor to some elements.
        premultiplied = self.premultiplied if self.group.size() > 1 else None
        if premultiplied is None or op is not ReduceOp.SUM or not fractional:
            return prescale, OPS[op], postscale
        # In a half type the factor itself would be rounded. It is applied before the sum, which
        # might overflow.
        if dtype.itemsize == 2:
            return prescale * postscale, OPS[op], 1.0
        # All ranks must use the same reduction, and only postscale is equal on all of them.
        if postscale == 1.0:
            return prescale, OPS[op], 1.0
        return 1.0, premultiplied(prescale * postscale), 1.0

    def _reduce(self, tensor: torch.Tensor, reduction: Any) -> None:
        if tensor.numel():
            options = dist.AllreduceOptions()
            options.reduceOp = reduction
            self.group.allreduce([tensor], options).wait()

    def broadcast(self, memory: torch.Tensor, root_rank: int) -> None:
        if memory.numel():
            self._start_broadcast(memory, root_rank).wait()

    def _start_broadcast(self, memory: torch.Tensor, root_rank: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root_rank, 0
        work: dist.Work = self.group.broadcast([memory], options)
        return work

    @torch.inference_mode()
    def allgather(self, send: torch.Tensor, receive: torch.Tensor, sizes: Sequence[int]) -> None:
        if self.even and len(set(sizes)) == 1 and sizes[0]:
            self.group._allgather_base(receive, send).wait()
            return
        # Neither library gathers uneven parts; broadcasts of all parts run concurrently.
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
        native = send.dtype not in (torch.bool, torch.uint64, *self._wider(op)) and not is_ordered(
            Buffer.of(send).dtype, op
        )
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
    """View complex numbers as their real and imaginary parts; only sums are computed of them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
