"""The communicator of the gloo and nccl engines."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import REDUCES_REAL, Capabilities, Communicator, Pending
from hvdtrain.engines.float_order import flip_highest, from_ordered, is_ordered, to_ordered
from hvdtrain.engines.torch_distributed.failures import Members, gloo_group, nccl_group
from hvdtrain.errors import ConnectionLostError, HvdtrainError, UnsupportedError
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


def capabilities(cuda: bool) -> Capabilities:
    """Return the capabilities of gloo, or with `cuda` of NCCL and gloo together."""
    return Capabilities(
        reduces=REDUCES_REAL,
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


_WIDE_ELEMENTS = 16 << 20  # number of elements converted to a wider type at a time


@dataclass(frozen=True)
class Group:
    """A process group of torch for one kind of memory, and how it reduces tensors.

    On a GPU, work is enqueued on the caller's current stream, and the host does not wait.
    """

    processes: Any
    wide: Widths
    premultiplied: Callable[[float], Any] | None = None
    even: bool = False

    def wider(self, op: ReduceOp) -> Widths:
        """Return the wider dtypes for a reduction: no library has 16-bit integers for ordering."""
        return GLOO_WIDE if op in (ReduceOp.MIN, ReduceOp.MAX) else self.wide

    def allreduce(
        self, tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        if tensor.dtype in (torch.bool, torch.uint64):
            Buffer.of(tensor).scale(prescale)
            if tensor.dtype == torch.bool:
                self._reduce(tensor.view(torch.uint8), BOOL_OPS[op])
            else:
                signed = tensor.view(torch.int64)
                flip_highest(signed, op)
                self._reduce(signed, OPS[op])
                flip_highest(signed, op)
            Buffer.of(tensor).scale(postscale)
        elif (wider := self.wider(op).get(tensor.dtype)) is not None:
            for piece in torch.split(tensor, _WIDE_ELEMENTS):
                wide = piece.to(wider)
                self._reduce_numbers(wide, op, prescale, postscale)
                piece.copy_(wide)
        else:
            self._reduce_numbers(tensor, op, prescale, postscale)

    def _reduce_numbers(
        self, tensor: torch.Tensor, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        before, reduction, after = self.factors(tensor.dtype, op, prescale, postscale)
        buffer = Buffer.of(tensor)
        buffer.scale(before)
        ordered = to_ordered(buffer, op)
        self._reduce(tensor_of(ordered), reduction)
        from_ordered(ordered, buffer)
        buffer.scale(after)

    def factors(
        self, dtype: torch.dtype, op: ReduceOp, prescale: float, postscale: float
    ) -> tuple[float, Any, float]:
        """Return the factor before a reduction, the reduction, and the factor after it."""
        fractional = dtype.is_floating_point or dtype.is_complex
        # With a single rank, NCCL 2.28 does not apply the factor to some elements.
        premultiplied = self.premultiplied if self.processes.size() > 1 else None
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
            self.start_reduction(tensor, reduction).wait()

    def start_reduction(self, tensor: torch.Tensor, reduction: Any) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp = reduction
        work: dist.Work = self.processes.allreduce([tensor], options)
        return work

    def start_broadcast(self, memory: torch.Tensor, root_rank: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root_rank, 0
        work: dist.Work = self.processes.broadcast([memory], options)
        return work


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers as their real and imaginary parts; only sums are computed of them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@collective
def connect(
    members: Members,
    device: torch.device,
    gather: Callable[[bytes], list[bytes]],
    halves_in_float32: bool,
) -> Group:
    """Connect the members' GPUs; `gather` gathers the bytes of each member."""
    records = gather(bytes([halves_in_float32]) + _digest(device))
    digests = [record[1:] for record in records]
    for rank, digest in enumerate(digests):
        if (first := digests.index(digest)) != rank:
            raise UnsupportedError(
                f"[rank {members.rank}/{members.size}] engine nccl: ranks {first} and {rank} have "
                f"the same GPU (here {device}): call torch.cuda.set_device(hvd.local_rank()) "
                "before anything is put on a GPU, start one rank for each GPU, or use engine mpi"
            )
    # Work on the GPU may depend on other ranks, which must not wait for this rank's allocations.
    torch.cuda.synchronize(device)
    wide = GLOO_WIDE if any(record[0] for record in records) else NCCL_WIDE
    make: Any = getattr(dist, "_make_nccl_premul_sum")  # noqa: B009  # not in CPU builds
    return Group(nccl_group(members, device), wide, premultiplied=make, even=True)


def _digest(device: torch.device) -> bytes:
    """Return a digest that is equal for ranks whose GPU NCCL considers the same."""
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    uuid = torch.cuda.get_device_properties(device).uuid
    return blake2b(f"{host} {uuid}".encode(), digest_size=16).digest()


class TorchCommunicator(Communicator):
    """One gloo group, which also carries control messages, and for nccl one NCCL group.

    The NCCL group is created when the members first allocate or use GPU memory. Earlier, the GPU of
    a rank is not known (Horovod's scripts select one after init()), and a communicator used for
    host memory only does not need the group.
    """

    @collective
    def __init__(self, members: Members, cuda: bool, halves_in_float32: bool) -> None:
        self.rank = members.rank
        self.size = members.size
        self.capabilities = capabilities(cuda)
        self._halves_in_float32 = halves_in_float32
        self._members: Members | None = members
        self._abort, self._failures = members.abort, members.failures
        self._splits = 0
        with self._peers("connect"):
            self._gloo: Group | None = Group(gloo_group(members), GLOO_WIDE)
        self._nccl: Group | None = None
        self._device: torch.device | None = None

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        signed = values.view(np.int64)
        flip_highest(signed, ReduceOp.MAX)
        work = self._host().start_reduction(torch.from_numpy(signed), OPS[ReduceOp.MAX])

        def end() -> None:
            with self._peers("agreement"):
                work.wait()
            flip_highest(signed, ReduceOp.MAX)

        return Pending(work.is_completed, end)

    @collective
    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        tensor = tensor_of(buffer)
        with self._peers("allreduce"):
            group = self._group(tensor)
            # A program's tensors may be inference tensors, which can be written in this mode only.
            with torch.inference_mode():
                group.allreduce(tensor, op, prescale, postscale)

    @collective
    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        memory = bytes_of(buffer)
        with self._peers("broadcast"):
            group = self._group(memory)
            if memory.numel():
                group.start_broadcast(memory, root_rank).wait()

    @collective
    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        outgoing, incoming = bytes_of(send), bytes_of(receive)
        sizes = [count * send.dtype.itemsize for count in counts]
        with self._peers("allgather"):
            group = self._group(incoming)
            with torch.inference_mode():
                if group.even and len(set(sizes)) == 1 and sizes[0]:
                    group.processes._allgather_base(incoming, outgoing).wait()
                    return
                # Neither library gathers uneven parts; broadcasts of all parts run concurrently.
                parts = torch.split(incoming, sizes)
                parts[self.rank].copy_(outgoing)
                works = [
                    group.start_broadcast(part, root_rank)
                    for root_rank, part in enumerate(parts)
                    if part.numel()
                ]
                for work in works:
                    work.wait()

    @collective
    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        outgoing, incoming = bytes_of(send), bytes_of(receive)
        sent, received = (
            [count * send.dtype.itemsize for count in counts]
            for counts in (send_counts, receive_counts)
        )
        with self._peers("alltoall"):
            processes, options = self._group(incoming).processes, dist.AllToAllOptions()
            processes.alltoall_base(incoming, outgoing, received, sent, options).wait()

    @collective
    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        outgoing, incoming = tensor_of(send), tensor_of(receive)
        with self._peers("reduce_scatter"):
            group = self._group(outgoing)
            converted = (torch.bool, torch.uint64, *group.wider(op))
            native = outgoing.dtype not in converted and not is_ordered(send.dtype, op)
            with torch.inference_mode():
                if not (group.even and native and len(set(counts)) == 1 and counts[0]):
                    # Neither library scatters uneven parts.
                    whole = outgoing.clone()
                    group.allreduce(whole, op, prescale, postscale)
                    incoming.copy_(torch.split(whole, list(counts))[self.rank])
                    return
                before, reduction, after = group.factors(outgoing.dtype, op, prescale, postscale)
                if before != 1.0:
                    outgoing = outgoing.clone()
                    Buffer.of(outgoing).scale(before)
                options = dist.ReduceScatterOptions()
                options.reduceOp = reduction
                parts = _real(incoming), _real(outgoing)
                group.processes._reduce_scatter_base(*parts, options).wait()
                Buffer.of(incoming).scale(after)

    def barrier(self) -> None:
        with self._peers("barrier"):
            self._host().processes.barrier(dist.BarrierOptions()).wait()

    @collective
    def split(self, ranks: Sequence[int]) -> TorchCommunicator | None:
        members = self._alive()
        self._splits += 1
        if self.rank not in ranks:
            return None
        part = replace(
            members,
            store=dist.PrefixStore(f"split {self._splits}", members.store),
            rank=list(ranks).index(self.rank),
            size=len(ranks),
            leave=bool,
        )
        return TorchCommunicator(part, "cuda" in self.capabilities.devices, self._halves_in_float32)

    @collective
    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        self._require(device)
        place = torch.device(device)
        if place.type == "cuda":
            self._connect(place)
            place = self._device or place  # "cuda" may have no index
        return torch.empty(nbytes, dtype=torch.uint8, device=place)

    def take_device(self) -> None:
        cuda: Any = torch.cuda
        if self._nccl is None and cuda.is_initialized():
            self._device = torch.device("cuda", cuda.current_device())

    def native(self, buffer: Buffer) -> Buffer:
        return buffer

    def confirm(self) -> None:
        # What gloo returns is complete; work on a GPU that was aborted ends as if it were.
        if self._failures is not None and self._nccl is not None:
            torch.cuda.synchronize(self._device)
            self._failures.check()

    def explained(self, error: BaseException) -> BaseException:
        return error if self._failures is None else self._failures.explained(error)

    def close(self) -> None:
        if self._members is None:
            return
        if self._nccl is not None and (self._failures is None or not self._failures.revoked):
            self._nccl.processes.shutdown()
        self._gloo = self._nccl = None
        leave, self._members = self._members.leave, None
        leave()

    def abort(self, code: int) -> None:
        self._abort(code)

    def _alive(self) -> Members:
        if self._members is None:
            raise ValueError("this communicator is closed")
        return self._members

    def _host(self) -> Group:
        self._alive()
        assert self._gloo is not None  # until it is closed
        return self._gloo

    @collective
    def _group(self, tensor: torch.Tensor) -> Group:
        return self._connect(tensor.device) if tensor.is_cuda else self._host()

    @collective
    def _connect(self, device: torch.device) -> Group:
        """Return the NCCL group, creating it on first use."""
        if self._nccl is None:
            self._device = self._indexed(device)
            with self._peers("connect"):
                self._nccl = connect(
                    self._alive(), self._device, self.gather_bytes, self._halves_in_float32
                )
        elif device not in (self._device, torch.device("cuda")):
            raise HvdtrainError(
                f"[rank {self.rank}/{self.size}] memory on {device}, but this rank is connected "
                f"to the others by {self._device}: keep tensors that are reduced "
                "together on one GPU"
            )
        return self._nccl

    def _indexed(self, device: torch.device) -> torch.device:
        """Return a device with its index, which a rank that has joined does not specify."""
        if device.index is not None:
            return device
        return self._device or torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def _peers(self, operation: str) -> Iterator[None]:
        """Convert errors of the network to ConnectionLostError."""
        try:
            yield
        except (HvdtrainError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". This is typically")[0]
            reason = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", reason)  # file and line in gloo's source
            raise ConnectionLostError(
                f"[rank {self.rank}/{self.size}] {operation}: the connection to another rank "
                f"failed ({reason}). Look at what that rank printed last"
            ) from None
