"""What an exchange communicates by: all ranks, and those of a node and across nodes apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdtrain.arrays import Array, buffer_of, elements_of
from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp

__all__ = ["Combine", "Wires", "gather", "slice_bounds"]

# Makes of every owner's slice one thing, in place: the slice, its first element, the network.
Combine = Callable[[Buffer, int, Communicator], None]


@dataclass(frozen=True)
class Wires:
    """The communicators of a plan, in the hands of the thread that moves its buckets.

    The first ranks of each node, as many as the smallest node has, own a slice each of what
    crosses the network, so that all of them drive it at once; other ranks own nothing.

    Attributes:
        whole: all ranks.
        node: the ranks of this node; None where each rank counts as a node.
        network: the owners of this rank's slice, one on each node; None on a rank that owns none.
        owners: how many slices there are.
    """

    whole: Communicator
    node: Communicator | None
    network: Communicator | None
    owners: int

    @classmethod
    def flat(cls, whole: Communicator) -> Wires:
        """Have each rank count as a node (local)."""
        return cls(whole, None, whole, 1)

    @classmethod
    def apart(cls, whole: Communicator, nodes: Sequence[int]) -> Wires:
        """Make communicators of the nodes, and across them (collective).

        Args:
            whole: all ranks.
            nodes: for each rank a number that is equal exactly within one node.
        """
        groups: dict[int, list[int]] = {}
        for rank, number in enumerate(nodes):
            groups.setdefault(number, []).append(rank)
        owners = min(len(ranks) for ranks in groups.values())
        node = _own(whole, list(groups.values()))
        slices = [[ranks[place] for ranks in groups.values()] for place in range(owners)]
        return cls(whole, node, _own(whole, slices), owners)

    def over_network(
        self,
        buffer: Buffer,
        combine: Combine,
        prescale: float = 1.0,
        cuts: Sequence[int] | None = None,
    ) -> None:
        """Add within the node, combine across nodes, and give every rank the result (collective).

        Args:
            buffer: overwritten with the result.
            combine: makes, in place, the same bits of its slice on all ranks of `network`; the
                slices are those of the nodes' sums. It is not called where there is one node only:
                nothing crosses a network.
            prescale: factor of this rank's elements.
            cuts: elements before which the buffer may be cut; by default, anywhere.
        """
        if self.node is None:
            buffer.scale(prescale)
            self._combine(buffer, 0, combine)
            return
        bounds = slice_bounds(buffer.count, self.owners, cuts)
        counts = [end - start for start, end in pairwise(bounds)]
        counts += [0] * (self.node.size - self.owners)
        own = buffer.like(counts[self.node.rank])
        self.node.reduce_scatter(buffer, own, counts, ReduceOp.SUM, prescale)
        if own.count:
            self._combine(own, bounds[self.node.rank], combine)
        self.node.allgather(own, buffer, counts)

    def _combine(self, own: Buffer, start: int, combine: Combine) -> None:
        if self.network is not None and self.network.size > 1:
            combine(own, start, self.network)

    def close(self) -> None:
        """Give the communicators of nodes and network back, but not `whole` (collective)."""
        for communicator in (self.node, self.network):
            if communicator is not None and communicator is not self.whole:
                communicator.close()


def gather(communicator: Communicator, array: Array) -> Array:
    """Return all members' arrays, which are of one shape, one behind the other (collective)."""
    send = buffer_of(array)
    receive = send.like(send.count * communicator.size)
    communicator.allgather(send, receive, [send.count] * communicator.size)
    return elements_of(receive).reshape(communicator.size, *array.shape)


def slice_bounds(count: int, owners: int, cuts: Sequence[int] | None = None) -> list[int]:
    """Return where the slices begin, of about equal size, and the end.

    Args:
        count: number of elements.
        owners: how many slices there are.
        cuts: where they may begin; by default, anywhere.
    """
    even = [count * owner // owners for owner in range(owners + 1)]
    if cuts is None:
        return even
    allowed = [*cuts, count]
    inner = [min(allowed, key=lambda cut: abs(cut - bound)) for bound in even[1:-1]]
    return [0, *inner, count]


def _own(whole: Communicator, groups: Sequence[Sequence[int]]) -> Communicator | None:
    """Make a communicator of each group; return this rank's (collective)."""
    own = None
    for ranks in groups:
        own = whole.split(ranks) or own
    return own
