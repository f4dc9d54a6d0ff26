"""A rank's part in the rounds of a parameter server, whatever the framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from typing import Protocol as Interface

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.core.point_to_point import open_point_to_point
from hvdtrain.errors import OneRankTrainingError
from hvdtrain.train.parameter_server.protocol import (
    AsynchronousProtocol,
    Protocol,
    SynchronousProtocol,
)
from hvdtrain.train.parameter_server.row import ParameterRow
from hvdtrain.train.parameter_server.server import Server, Shard
from hvdtrain.train.parameter_server.settings import ParameterServer
from hvdtrain.train.parameter_server.shards import Piece, pieces, shard_bounds
from hvdtrain.train.parameter_server.states import (
    ShardState,
    State,
    collect_states,
    collect_weights,
)
from hvdtrain.train.parameter_server.statistics import Pushes
from hvdtrain.train.parameter_server.wire import Flat
from hvdtrain.train.parameter_server.worker import Worker


class ServedShard(Shard, ShardState, Interface):
    """A shard of the weights with its optimizer, and the optimizer's state."""


S = TypeVar("S", bound=ServedShard)


class ServedRounds(Generic[S]):
    """A rank's part in the rounds of a parameter server (collective to make)."""

    def __init__(
        self,
        settings: ParameterServer,
        row: ParameterRow,
        make_shard: Callable[[list[Piece], Flat], S],
    ) -> None:
        here = context.current()
        rank, size = here.topology.rank, here.topology.size
        self._settings, self._row = settings, row
        self.workers, self.pushes = size - settings.servers, Pushes()
        ranges = shard_bounds(row.sizes, settings.servers)
        self._bounds = dict(zip(range(self.workers, size), ranges, strict=True))
        self._messages = open_point_to_point(here.world)
        self._blocked = here.blocked.running
        self._worker = Worker(self._messages, self._bounds, self._blocked)
        self.shard: S | None = None
        if rank in self._bounds:
            bounds = self._bounds[rank]
            self.shard = make_shard(list(pieces(row.sizes, bounds)), row.weights[slice(*bounds)])
        self._received = Pushes()

    def pull(self, samples: int) -> bool:
        """Begin a round of a worker: overwrite the parameters with the servers' weights."""
        is_open = self._worker.pull(self._row.weights, samples)
        if is_open:
            self._row.write_weights()
        return is_open

    def push(self, step: int, samples: int) -> None:
        """End a round of a worker: send the gradients to the servers."""
        self._row.read_gradients()
        if samples and not np.isfinite(self._row.gradients).all():
            raise OneRankTrainingError(
                f"step {step + 1}: the gradient of this rank is not finite. Lower --lr, "
                "lengthen --warmup-epochs, or look at the samples of this step"
            )
        self._worker.push(self._row.gradients, samples)

    def serve(self, shard: S, first: int, rounds: int, after_round: Callable[[], bool]) -> None:
        """Serve the rounds of all workers."""
        server = Server(self._messages, shard, self._protocol(), self._blocked, first)
        self._received = server.serve(rounds, after_round)

    def _protocol(self) -> Protocol:
        settings = self._settings
        if settings.is_async:
            return AsynchronousProtocol(self.workers, settings.staleness)
        return SynchronousProtocol(self.workers, settings.backup)

    @collective
    def collect(self) -> list[State]:
        """Overwrite the parameters of all ranks with the servers' weights."""
        outline = [] if self.shard is None else self.shard.outline()
        gathered = allgather_object((outline, self._received), name="shards")
        self._received = Pushes()
        for _, received in gathered:
            self.pushes.add(received)
        collect_weights(self._row.weights, self._bounds)
        self._row.write_weights()
        outlines = {server: gathered[server][0] for server in self._bounds}
        return collect_states(self._row.sizes, self._bounds, outlines, self.shard)
