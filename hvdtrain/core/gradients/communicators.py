"""The communicators of an exchange: all ranks, the ranks of a node, and one rank of each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.gradients.plan import STEP
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp

if TYPE_CHECKING:
    from hvdtrain.arrays import Array

__all__ = [
    "Combine",
    "Communicators",
    "communicators_of",
    "gather",
    "open_communicators",
    "slice_bounds",
]

# Combines the owners' slices in place, given a slice, its first element, and the network.
Combine = Callable[[Buffer, int, Communicator], None]


@dataclass(frozen=True)
class Communicators:
    """The communicators of a plan, for use by the thread that reduces its buckets.

    The first ranks of each node, as many as the smallest node has, each own a slice of the data
    that crosses the network, so that all of them use the network at the same time. Other ranks
    own nothing.

    Attributes:
        all_ranks: communicator of all ranks.
        node: communicator of the ranks of this node; None if each rank counts as a node.
        network: communicator of the owners of this rank's slice, one on each node; None on a rank
            that owns no slice, and on a single node.
        owners: number of slices.
    """

    all_ranks: Communicator
    node: Communicator | None
    network: Communicator | None
    owners: int

    @classmethod
    def flat(cls, all_ranks: Communicator) -> Communicators:
        """Return communicators for which each rank counts as a node (local)."""
        return cls(all_ranks, None, all_ranks, 1)

    @classmethod
    @collective
    def hierarchical(cls, all_ranks: Communicator, nodes: Sequence[int]) -> Communicators:
        """Create communicators within the nodes, numbered by rank, and across them (collective)."""
        groups: dict[int, list[int]] = {}
        for rank, number in enumerate(nodes):
            groups.setdefault(number, []).append(rank)
        owners = min(len(ranks) for ranks in groups.values())
        if len(groups) == 1:
            return cls(all_ranks, all_ranks, None, owners)
        node = _split(all_ranks, list(groups.values()))
        slices = [[ranks[index] for ranks in groups.values()] for index in range(owners)]
        return cls(all_ranks, node, _split(all_ranks, slices), owners)

    @property
    def one_node(self) -> bool:
        """Whether nothing crosses a network, because there is only one node."""
        return self.all_ranks.size == (1 if self.node is None else self.node.size)

    @collective
    def over_network(
        self,
        buffer: Buffer,
        combine: Combine,
        prescale: float = 1.0,
        cuts: Sequence[int] | None = None,
    ) -> None:
        """Sum within each node, combine the sums across nodes, and distribute (collective).

        Args:
            buffer: elements of this rank, overwritten with the result.
            combine: function that combines, in place, a slice of the nodes' sums over `network`,
                with the same bits on all of its ranks. It is not called if there is only one
                node, because then nothing crosses a network.
            prescale: factor for this rank's elements.
            cuts: elements at which slices may begin; by default, any.
        """
        if self.one_node:
            self.all_ranks.allreduce(buffer, ReduceOp.SUM, prescale)
            return
        if self.node is None or self.node.size == 1:
            assert self.network is not None  # the first rank of a node owns a slice
            buffer.scale(prescale)
            combine(buffer, 0, self.network)
            return
        bounds = slice_bounds(buffer.count, self.owners, cuts)
        counts = [end - start for start, end in pairwise(bounds)]
        counts += [0] * (self.node.size - self.owners)
        own = buffer.like(counts[self.node.rank])
        self.node.reduce_scatter(buffer, own, counts, ReduceOp.SUM, prescale)
        if own.count and self.network is not None:
            combine(own, bounds[self.node.rank], self.network)
        self.node.allgather(own, buffer, counts)

    @collective
    def close(self) -> None:
        """Close the communicators of node and network, but not `all_ranks` (collective)."""
        _OPENED.pop(self.all_ranks, None)
        for communicator in (self.node, self.network):
            if communicator is not None and communicator is not self.all_ranks:
                communicator.close()


@collective
def open_communicators(channel: Channel, spec: str, node: int, name: str) -> Communicators:
    """Create a hierarchical exchange's communicators, until the channel closes (collective).

    It takes the place of a plan's step, so that a rank which submits a step gets an error.
    """

    def open_on(communicator: Communicator) -> Communicators:
        nodes = np.empty(communicator.size, np.int64)
        communicator.allgather(
            Buffer.from_array(np.array([node], np.int64)),
            Buffer.from_array(nodes),
            [1] * communicator.size,
        )
        _OPENED[communicator] = Communicators.hierarchical(communicator, nodes.tolist())
        return _OPENED[communicator]

    request = Request(STEP, name, (("nodes for exchange", spec),))
    communicators: Communicators = channel.run(Work(request, open_on))
    channel.before_closing(communicators.close)
    return communicators


# Also for the answers of a rank that has joined, which knows only the channel's communicator.
_OPENED: dict[Communicator, Communicators] = {}


def communicators_of(communicator: Communicator, hierarchical: bool) -> Communicators:
    """Return the communicators opened for a channel; else each rank counts as a node (local)."""
    opened = _OPENED.get(communicator) if hierarchical else None
    return opened or Communicators.flat(communicator)


@collective
def gather(communicator: Communicator, array: Array) -> Array:
    """Stack members' arrays, of equal shape and dtype, to [members, *array.shape] (collective)."""
    from hvdtrain.arrays import buffer_of, elements_of

    send = buffer_of(array)
    receive = send.like(send.count * communicator.size)
    communicator.allgather(send, receive, [send.count] * communicator.size)
    return elements_of(receive).reshape(communicator.size, *array.shape)


def slice_bounds(count: int, owners: int, cuts: Sequence[int] | None = None) -> list[int]:
    """Return the bounds of slices of about equal size: `owners` + 1 numbers from 0 to `count`.

    Slices begin at some of `cuts`; by default, anywhere.
    """
    even = [count * owner // owners for owner in range(owners + 1)]
    if cuts is None:
        return even
    allowed = [*cuts, count]
    inner = [min(allowed, key=lambda cut: abs(cut - bound)) for bound in even[1:-1]]
    return [0, *inner, count]


@collective
def _split(all_ranks: Communicator, groups: Sequence[Sequence[int]]) -> Communicator | None:
    """Create a communicator of each group; return the one of this rank."""
    own = None
    for ranks in groups:
        own = all_ranks.split(ranks) or own
    return own
