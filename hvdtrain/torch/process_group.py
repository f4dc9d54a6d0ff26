"""A backend of torch.distributed, "hvdtrain", for libraries that communicate through it.

    import torch
    import hvdtrain.torch.process_group
    torch.distributed.init_process_group("hvdtrain")

DDP and all that is built on it then reduce on hvdtrain's ranks. It takes tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed
from torch._C._distributed_c10d import Work
from torch.futures import Future

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.types import ReduceOp

__all__ = ["HvdProcessGroup"]

_REDUCTIONS = {
    "SUM": hvd.Sum,
    "AVG": hvd.Average,
    "MIN": hvd.Min,
    "MAX": hvd.Max,
    "PRODUCT": hvd.Product,
}


def missing(operation: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that refuses an operation."""

    def refuse(self: Any, *arguments: Any) -> NoReturn:
        raise UnsupportedError(
            f"{hvd.rank()}/{hvd.size()}: backend hvdtrain has no {operation}: {instead}"
        )

    return refuse


def reduction_of(options: Any) -> ReduceOp:
    """Return the reduction that options of torch.distributed name; without options the sum."""
    name = "SUM" if options is None else options.reduceOp.op.name
    if name not in _REDUCTIONS:
        raise UnsupportedError(f"backend hvdtrain reduces by {', '.join(_REDUCTIONS)}, not {name}")
    return _REDUCTIONS[name]


Tensors = Sequence[torch.Tensor]


class SubmittedWork(Work):
    """An operation that a thread runs; waiting for it raises what it has raised."""

    def __init__(self) -> None:
        super().__init__()
        self._done: Future[list[torch.Tensor]] = Future()
        # C++ treats a future that holds a Python exception as completed, and sees an error only if
        # a callback raises. The backward pass of DDP waits in C++.
        self._future: Future[list[torch.Tensor]] = self._done.then(lambda done: done.value())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is done: hvdtrain watches ranks that are late, and ends jobs by itself."""
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self._future

    def run(self, operation: Callable[[], None], result: Tensors) -> None:
        """Run the operation, and wake those who wait."""
        try:
            with torch.no_grad():
                operation()
        except Exception as error:
            self._done.set_exception(error)  # type: ignore[arg-type]
        else:
            self._done.set_result(list(result))


_OTHERS_HAVE_IT = (
    "use all_to_all_single() with splits, or a group of a backend that has it, such as "
    "torch.distributed.new_group(backend='gloo')"
)
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
        self._thread = ThreadPoolExecutor(1, "hvdtrain-process-group")
        self._name = self._group_name = name
        self._count = 0

    def _submit(self, kind: str, run: Callable[[str], None], result: Tensors) -> SubmittedWork:
        """Run an operation after those before it, and return what waits for it."""
        self._count += 1
        name = f"{self._name}.{kind}.{self._count}"
        submitted = SubmittedWork()
        self._thread.submit(submitted.run, lambda: run(name), result)
        return submitted

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "hvdtrain"

    def setGroupName(self, name: str) -> None:
        """Take the name by which torch.distributed finds the group for functional collectives."""
        self._group_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def shutdown(self) -> None:
        """Wait for what has been submitted, and take no more."""
        self._thread.shutdown()

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce each tensor in place."""
        op = reduction_of(opts)

        def run(name: str) -> None:
            for number, tensor in enumerate(tensors):
                hvd.allreduce_(tensor, name=f"{name}.{number}", op=op)

        return self._submit("allreduce", run, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce a tensor, for one rank."""
        op = reduction_of(opts)

        def run(name: str) -> None:
            reduced = hvd.allreduce(tensors[0], name=name, op=op)
            if self._rank == opts.rootRank:
                tensors[0].copy_(reduced)

        return self._submit("reduce", run, tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        """Overwrite a tensor with that of one rank."""

        def run(name: str) -> None:
            hvd.broadcast_(tensors[0], opts.rootRank if opts else 0, name)

        return self._submit("broadcast", run, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Write the tensors of all ranks into a list."""
        return self._gather("allgather", outputs, inputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Write the tensors of all ranks into a list on one rank; others give none."""
        return self._gather("gather", outputs, inputs)

    def _gather(self, kind: str, outputs: Sequence[Tensors], inputs: Tensors) -> SubmittedWork:
        def run(name: str) -> None:
            gathered = hvd.allgather(inputs[0].reshape(1, -1), name)
            for parts in outputs:
                for output, row in zip(parts, gathered, strict=True):
                    output.copy_(row.view_as(output))

        return self._submit(kind, run, [tensor for row in outputs for tensor in row])

    def all_gather_single(
        self, output: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Write the tensors of all ranks into one."""
        return self.all_gather_single_coalesced([output], [input_tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do the same for several tensors."""

        def run(name: str) -> None:
            gathered = hvd.grouped_allgather([tensor.reshape(-1) for tensor in inputs], name)
            for output, found in zip(outputs, gathered, strict=True):
                output.view(-1).copy_(found)

        return self._submit("allgather", run, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Give each rank one of the tensors of one rank."""

        def run(name: str) -> None:
            mine = outputs[0]
            every = mine.new_empty(self._size, mine.numel())
            if self._rank == opts.rootRank:
                torch.stack([tensor.reshape(-1) for tensor in inputs[0]], out=every)
            mine.copy_(hvd.broadcast_(every, opts.rootRank, name)[self._rank].view_as(mine))

        return self._submit("scatter", run, outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Give each rank its part of the reduced tensors."""
        return self.reduce_scatter_single(outputs[0], torch.stack(list(inputs[0])), opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input_tensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """Give each rank its part of a reduced tensor."""
        return self.reduce_scatter_single_coalesced([output], [input_tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do the same for several tensors."""
        op = reduction_of(opts)

        def run(name: str) -> None:
            parts = [tensor.reshape(self._size, -1) for tensor in inputs]
            reduced = hvd.grouped_reducescatter(parts, name, op=op)
            for output, part in zip(outputs, reduced, strict=True):
                output.copy_(part.view_as(output))

        return self._submit("reducescatter", run, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

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

        return self._submit("alltoall", run, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """Send each rank a part of a tensor, by default an equal one."""

        def run(name: str) -> None:
            sent = list(input_splits) or _equal_parts(input_tensor, self._size)
            wanted = list(output_splits) or _equal_parts(output, self._size)
            received, rows = hvd.alltoall(input_tensor, sent, name)
            if rows.tolist() != wanted:
                raise MismatchError(
                    f"[rank {self._rank}/{self._size}] alltoall {name!r}: ranks sent "
                    f"{rows.tolist()} rows, and this one has room for {wanted}: give "
                    "output_split_sizes what the others have as input_split_sizes for this rank"
                )
            output.copy_(received.view_as(output))

        return self._submit("alltoall", run, [output])

    alltoall_base = all_to_all_single

    send = missing("send()", _OTHERS_HAVE_IT)
    recv = recv_anysource = missing("recv()", _OTHERS_HAVE_IT)
    allgather_coalesced = missing("all_gather_coalesced()", "call all_gather() for each tensor")

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""

        def run(name: str) -> None:
            hvd.allreduce(torch.zeros(1), name=name)

        return self._submit("barrier", run, [])


def _equal_parts(tensor: torch.Tensor, size: int) -> list[int]:
    return [len(tensor) // size] * size


@collective
def _create(_: Any, rank: int, size: int, timeout: timedelta) -> HvdProcessGroup:
    """Return the group that init_process_group() or new_group() asks for."""
    hvd.init()
    if (rank, size) != (hvd.rank(), hvd.size()):
        raise UnsupportedError(
            f"{hvd.rank()}/{hvd.size()}: backend hvdtrain supports only groups of all ranks in "
            f"order, but this group has this process as rank {rank} of {size}: start ranks with "
            "`python -m hvdtrain exec`, and use another backend for groups of fewer ranks"
        )
    global _groups
    _groups += 1
    return HvdProcessGroup(f"process group {_groups}")


_groups = 0
distributed.Backend.register_backend("hvdtrain", _create, devices=["cpu"])
