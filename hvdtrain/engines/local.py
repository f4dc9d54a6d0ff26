"""The engine of a single rank, which needs no communication library."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines.communicator import (
    ANY_DEVICE,
    Capabilities,
    Communicator,
    EngineWorld,
    Pending,
)
from hvdtrain.types import DType, ReduceOp

_CAPABILITIES = Capabilities(
    reduces={
        op: frozenset(DType) for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    },
    moves=frozenset(DType),
    devices=ANY_DEVICE,
    concurrent=False,
)
_DONE = Pending(lambda: True)


class LocalCommunicator(Communicator):
    """A communicator of one."""

    rank = 0
    size = 1
    capabilities = _CAPABILITIES

    def start_max(self, values: np.typing.NDArray[np.uint64]) -> Pending:
        return _DONE

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self.native(buffer).scale(prescale * postscale)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        pass

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        receive.copy_from(send)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        receive.copy_from(send)

    def barrier(self) -> None:
        pass

    def split(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        return LocalCommunicator() if 0 in ranks else None

    def close(self) -> None:
        pass

    def abort(self, code: int) -> None:
        os._exit(code)


def open_world(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Return a world of this process alone."""
    return EngineWorld("local", "none", LocalCommunicator(), (0,), (socket.gethostname(),))
