"""The slices of memory that the ranks of a node share, reduced across nodes over MPI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.engines.mpi.types import MPI_OPS, typed
from hvdtrain.engines.shared_memory.node_group import NodeGroup
from hvdtrain.engines.shared_memory.numpy_kernel import NumpyNodeGroup
from hvdtrain.engines.slices import Slices
from hvdtrain.polling import poll_until
from hvdtrain.types import DType, ReduceOp

# As many bytes as one rank sends at a time in an all-reduce between nodes.
_PIECE_BYTES = 256 << 10


class NodeSlices(Slices):
    """Slices in the memory of a node group."""

    def __init__(
        self,
        group: NodeGroup | NumpyNodeGroup,
        number: int,
        owners: int,
        across: MPI.Comm | None,
        nodes: int,
    ) -> None:
        self._group, self._across = group, across
        self.number, self.owners, self.nodes = number, owners, nodes
        self.in_tree = isinstance(group, NodeGroup)
        self.adds_placed = self.in_tree and nodes == 1

    def copies(self, memory: Elements) -> list[npt.NDArray[np.uint8]] | None:
        return self._group.arena.copies(Buffer.of(memory))

    def reduce(self, buffer: Buffer, prescale: float, postscale: float) -> None:
        alone = self.nodes == 1
        own = self._group.add(
            buffer, ReduceOp.SUM, prescale, self.owners, postscale if alone else 1.0
        )
        if alone or self._across is None:
            return
        # With two at a time, the network is busy while one ends and the next begins.
        requests: list[MPI.Request] = []
        for piece in own.pieces(_PIECE_BYTES):
            requests.append(
                self._across.Iallreduce(MPI.IN_PLACE, typed(piece), op=MPI_OPS[ReduceOp.SUM])
            )
            if len(requests) > 1:
                poll_until(requests.pop(0).Test)
        for request in requests:
            poll_until(request.Test)
        own.scale(postscale)

    def add_placed(
        self,
        rows: npt.NDArray[np.uint64],
        dtype: DType,
        prescales: Sequence[float],
        postscale: float,
    ) -> None:
        assert isinstance(self._group, NodeGroup)
        self._group.add_placed(rows, dtype, prescales, postscale)

    def spread(self, buffer: Buffer) -> None:
        self._group.spread(buffer, 1.0, self.owners)

    def meet(self) -> None:
        self._group.meet()
