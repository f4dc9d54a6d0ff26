"""Reduce-scatter: a reduction of which every member keeps a part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.collectives.devices import device_details, device_types
from hvdtrain.core.collectives.division import divide_truncating
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp


def rows_of_rank(rows: int, rank: int, size: int) -> int:
    """Return how many rows a rank receives: equally many, and lower ranks one of the remainder."""
    return rows // size + (rank < rows % size)


class ReduceScatter(Operation):
    """Reduce buffers and keep this member's part of the first dimension.

    The result is new memory for each tensor of the group; the buffers are not changed.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        shapes: Sequence[Sequence[int]],
        op: ReduceOp,
        name: str,
        prescale: float = 1.0,
        postscale: float = 1.0,
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._buffers, self._shapes, self._op = buffers, shapes, op
        self._prescale, self._postscale = prescale, postscale
        details = (
            ("op", op.value),
            ("shape", ", ".join(str(tuple(shape)) for shape in shapes)),
            ("dtype", ", ".join(kinds or [buffer.dtype.value for buffer in buffers])),
            ("prescale", repr(float(prescale))),
            ("postscale", repr(float(postscale))),
            *device_details(device_types(buffers)),
        )
        self.request = Request("reducescatter", name, details)

    def execute(self, communicator: Communicator) -> list[Buffer]:
        pairs = zip(self._buffers, self._shapes, strict=True)
        return [self._reduce(communicator, buffer, shape) for buffer, shape in pairs]

    def _reduce(self, communicator: Communicator, send: Buffer, shape: Sequence[int]) -> Buffer:
        width, size = prod(shape[1:]), communicator.size
        counts = [rows_of_rank(shape[0], rank, size) * width for rank in range(size)]
        receive = send.like(counts[communicator.rank])
        average = self._op is ReduceOp.AVERAGE
        divides = average and send.dtype.is_integer
        factor = self._postscale / size if average and not divides else self._postscale
        op = ReduceOp.SUM if average else self._op
        communicator.reduce_scatter(send, receive, counts, op, self._prescale, factor)
        if divides:
            divide_truncating(receive, size)
        return receive
