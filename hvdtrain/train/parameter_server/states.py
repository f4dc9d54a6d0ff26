"""Weights and optimizer state, brought from the servers to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.train.parameter_server.shards import Piece
from hvdtrain.train.parameter_server.wire import Flat

# The optimizer's state of a parameter or piece by name: an array of one element for each of its
# elements, or its numpy type; or any other value.
State: TypeAlias = dict[str, Any]
# The pieces of a shard with their states, of which arrays are given by their types.
Outline: TypeAlias = Sequence[tuple[Piece, State]]
# Where each server's shard begins and ends in the row of all parameters, by the server's rank.
Bounds: TypeAlias = Mapping[int, tuple[int, int]]


class ShardState(Protocol):
    """The optimizer's state of a shard."""

    def outline(self) -> Outline:
        """Return each piece with its state."""

    def write_state(self, name: str, flat: Flat) -> None:
        """Write a state with an element for each element of all pieces.

        Args:
            flat: memory for the shard's state, [n]; pieces without the state are left as they are.
        """


@collective
def collect_weights(weights: Flat, bounds: Bounds) -> None:
    """Overwrite weights with those of the servers."""
    _broadcast_shards(weights, bounds, "weights")


@collective
def collect_states(
    sizes: Sequence[int],
    bounds: Bounds,
    outlines: Mapping[int, Outline],
    shard: ShardState | None,
) -> list[State]:
    """Return the optimizer's state of each whole parameter."""
    pieces = [pair for outline in outlines.values() for pair in outline]
    types = {n: v for _, state in pieces for n, v in state.items() if isinstance(v, np.dtype)}
    memory = {name: np.zeros(sum(sizes), types[name]) for name in sorted(types)}
    for name, whole in memory.items():
        if shard is not None:
            shard.write_state(name, whole[slice(*bounds[context.current().topology.rank])])
        _broadcast_shards(whole, bounds, name)
    starts = list(accumulate([0, *sizes]))
    states: list[State] = [{} for _ in sizes]
    for piece, state in pieces:
        whole_parameter = slice(starts[piece.parameter], starts[piece.parameter + 1])
        for name, value in state.items():
            is_type = isinstance(value, np.dtype)
            states[piece.parameter][name] = memory[name][whole_parameter] if is_type else value
    return states


def _broadcast_shards(whole: Flat, bounds: Bounds, name: str) -> None:
    channel = context.current().world
    for server, (begin, end) in bounds.items():
        if begin < end:
            part, label = whole[begin:end], f"{name} of rank {server}"
            operations.broadcast(channel, Buffer.of(part), part.shape, server, label).run()
