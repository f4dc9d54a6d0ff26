"""A backend of torch.distributed, "hvdtrain", for libraries that communicate through it.

    import torch
    import hvdtrain.torch.process_group
    torch.distributed.init_process_group("hvdtrain")

DDP and all that is built on it then reduce on hvdtrain's ranks. It takes tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

import hvdtrain.torch as hvd
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.process_group_work import OperationThread, Tensors
from hvdtrain.types import ReduceOp

__all__ = ["HvdProcessGroup"]

_OPERATIONS = {
    "SUM": hvd.Sum,
    "AVG": hvd.Average,
    "MIN": hvd.Min,
    "MAX": hvd.Max,
    "PRODUCT": hvd.Product,
}
# Its methods are declared with all forms that Python may call, of which C++ uses one.
_PROCESS_GROUP: Any = distributed.ProcessGroup


class HvdProcessGroup(_PROCESS_GROUP):  # type: ignore[misc]
    """A group of all ranks, whose operations run one after the other in a thread of its own.

    All ranks call the same operations in the same order, as torch.distributed demands.

    Args:
        name: name of the group in messages, equal on all ranks.
    """

    def __init__(self, name: str) -> None:
        super().__init__(hvd.rank(), hvd.size())
        self._rank, self._size = hvd.rank(), hvd.size()
        self._operations = OperationThread(name)

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "hvdtrain"

    def shutdown(self) -> None:
        """Wait for what has been submitted, and take no more."""
        self._operations.shutdown()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce each tensor in place."""
        op = _operation(opts)

        def run(name: str) -> None:
            for number, tensor in enumerate(tensors):
                hvd.allreduce_(tensor, name=f"{name}.{number}", op=op)

        return self._operations.submit("allreduce", run, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce a tensor, for one rank."""
        op = _operation(opts)

        def run(name: str) -> None:
            reduced = hvd.allreduce(tensors[0], name=name, op=op)
            if self._rank == opts.rootRank:
                tensors[0].copy_(reduced)

        return self._operations.submit("reduce", run, tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        """Overwrite a tensor with that of one rank."""

        def run(name: str) -> None:
            hvd.broadcast_(tensors[0], opts.rootRank if opts else 0, name)

        return self._operations.submit("broadcast", run, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Write the tensors of all ranks into a list."""

        def run(name: str) -> None:
            gathered = hvd.allgather(inputs[0].reshape(1, -1), name)
            for output, row in zip(outputs[0], gathered, strict=True):
                output.copy_(row.view_as(output))

        return self._operations.submit(
            "allgather", run, [tensor for row in outputs for tensor in row]
        )

    def all_gather_single(
        self, output: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Write the tensors of all ranks into one."""

        def run(name: str) -> None:
            output.view(-1).copy_(hvd.allgather(input_tensor.reshape(-1), name))

        return self._operations.submit("allgather", run, [output])

    _allgather_base = all_gather_single

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Write the tensors of all ranks into a list on one rank."""

        def run(name: str) -> None:
            gathered = hvd.allgather(inputs[0].reshape(1, -1), name)
            for output, row in zip(outputs[0] if outputs else (), gathered, strict=False):
                output.copy_(row.view_as(output))

        return self._operations.submit("gather", run, inputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Give each rank one of the tensors of one rank."""

        def run(name: str) -> None:
            mine = outputs[0]
            every = mine.new_empty(self._size, mine.numel())
            if self._rank == opts.rootRank:
                torch.stack([tensor.reshape(-1) for tensor in inputs[0]], out=every)
            mine.copy_(hvd.broadcast_(every, opts.rootRank, name)[self._rank].view_as(mine))

        return self._operations.submit("scatter", run, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Give each rank its part of the reduced tensors."""
        return self.reduce_scatter_single(outputs[0], torch.stack(list(inputs[0])), opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Give each rank its part of a reduced tensor."""
        op = _operation(opts)

        def run(name: str) -> None:
            parts = input_tensor.reshape(self._size, -1)
            output.copy_(hvd.reducescatter(parts, name, op=op).view_as(output))

        return self._operations.submit("reducescatter", run, [output])

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Send each rank a tensor."""

        def run(name: str) -> None:
            sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
            splits = torch.tensor([tensor.numel() for tensor in inputs])
            received = hvd.alltoall(sent, splits, name)[0]
            for output, part in zip(
                outputs, received.split([tensor.numel() for tensor in outputs]), strict=True
            ):
                output.copy_(part.view_as(output))

        return self._operations.submit("alltoall", run, outputs)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""

        def run(name: str) -> None:
            hvd.allreduce(torch.zeros(1), name=name)

        return self._operations.submit("barrier", run, [])


def _operation(options: Any) -> ReduceOp:
    name = "SUM" if options is None else options.reduceOp.op.name
    if name not in _OPERATIONS:
        raise UnsupportedError(f"backend hvdtrain reduces by {', '.join(_OPERATIONS)}, not {name}")
    return _OPERATIONS[name]


def _create(_: Any, rank: int, size: int, timeout: timedelta) -> HvdProcessGroup:
    """Return the group that init_process_group() or new_group() asks for (collective)."""
    hvd.init()
    if (rank, size) != (hvd.rank(), hvd.size()):
        raise UnsupportedError(
            f"{hvd.rank()}/{hvd.size()}: backend hvdtrain has groups of all ranks in their order "
            f"only, and this is {rank} of {size}: start ranks by `python -m hvdtrain exec`, and "
            "give a group of fewer ranks another backend"
        )
    global _groups
    _groups += 1
    return HvdProcessGroup(f"process group {_groups}")


_groups = 0
distributed.Backend.register_backend("hvdtrain", _create, devices=["cpu"])
