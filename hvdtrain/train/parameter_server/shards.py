"""The shards of the weights: all parameters in a row, cut into equal parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.errors import UsageError
from hvdtrain.train.parameter_server.protocol import Flat

_TYPES = ("float32", "float64")


class ParameterRow(ABC):
    """Copies of a model's trained parameters and their gradients in host memory.

    Attributes:
        weights: memory for their values, one after the other, [n].
        gradients: memory for their gradients, [n].
    """

    def __init__(self, sizes: Sequence[int], types: Sequence[str]) -> None:
        found = sorted(set(types))
        if len(found) != 1 or found[0] not in _TYPES:
            raise UsageError(
                f"a parameter server needs trained parameters of one type, {' or '.join(_TYPES)}, "
                f"got {' and '.join(found) or 'no parameter'}"
            )
        self.sizes = list(sizes)
        self.weights: Flat = np.zeros(sum(sizes), found[0])
        self.gradients: Flat = np.zeros_like(self.weights)

    @abstractmethod
    def read_weights(self) -> None:
        """Copy the parameters to `weights`."""

    @abstractmethod
    def write_weights(self) -> None:
        """Copy `weights` to the parameters."""

    @abstractmethod
    def read_gradients(self) -> None:
        """Copy the gradients to `gradients`; a parameter without one counts as 0."""


# Parameters are cut at multiples of this. Vectorized optimizers round the elements of a vector and
# those left over differently: these are then the same in the pieces as in the whole parameter.
_CUT_ELEMENTS = 64


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that is in a shard."""

    parameter: int
    start: int
    begin: int
    count: int


def shard_bounds(sizes: Sequence[int], servers: int) -> list[tuple[int, int]]:
    """Return where each shard begins and ends in the row of all parameters."""
    elements = sum(sizes)
    cuts = [_cut_before(sizes, elements * server // servers) for server in range(servers)]
    return list(pairwise([*cuts, elements]))


def _cut_before(sizes: Sequence[int], position: int) -> int:
    """Return the last place at or before a position where a parameter may be cut."""
    start = max(start for start in accumulate([0, *sizes]) if start <= position)
    return start + (position - start) // _CUT_ELEMENTS * _CUT_ELEMENTS


def pieces(sizes: Sequence[int], bounds: tuple[int, int]) -> Iterator[Piece]:
    """Yield the pieces of a shard in the order of the parameters."""
    first, end = bounds
    for parameter, (start, size) in enumerate(zip(accumulate([0, *sizes]), sizes, strict=False)):
        begin, stop = max(first, start), min(end, start + size)
        if begin < stop:
            yield Piece(parameter, begin - first, begin - start, stop - begin)


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
