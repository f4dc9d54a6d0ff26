"""The vote of a round, and the exchange of objects if it fails.

Members nearly always have the same requests. In each round a non-blocking MAX all-reduce compares
three small hashes of every member: of its next request, of all its requests, and of all its
requests sorted. Full requests are exchanged only if all three differ.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request, ballot
from hvdtrain.engines.communicator import Communicator

__all__ = ["agree_on_one", "exchange", "unanimous", "vote_on_batch"]

T = TypeVar("T")

# The hashes of a vote; for a single request they are equal.
_HASHES = 3


def unanimous(communicator: Communicator, requests: Sequence[Request]) -> list[int]:
    """Wait until every member votes, and find the requests in common (collective).

    Args:
        communicator: communicator of the members.
        requests: requests of this member, at least one, in the order of submission.

    Returns:
        Positions in `requests` of requests that all members have, in an order that is the same
        for all: all positions if all members have the same set of requests, the first if only
        the first request is equal, otherwise none.
    """
    own, order = _hashed(requests)
    votes = np.frombuffer(bytearray(own), np.uint64)
    communicator.start_max(votes).wait()
    return _common(own, order, votes)


def vote_on_batch(
    communicator: Communicator, operations: Sequence[Operation]
) -> tuple[list[int], bool]:
    """Do what `unanimous` does, and run the operations if all members vote so for the same set.

    Args:
        communicator: communicator of the members, of which others may call `unanimous`.
        operations: pending operations of this member, at least one, which have equal batch keys.

    Returns:
        Positions in `operations`, as of `unanimous`, and whether these operations were run.
    """
    own, order = _hashed([operation.request for operation in operations])
    votes = np.frombuffer(bytearray(own), np.uint64)
    first, *others = [operations[position] for position in order]
    if first.vote_on_batch(others, communicator, votes):
        return order, True
    return _common(own, order, votes), False


def _hashed(requests: Sequence[Request]) -> tuple[bytes, list[int]]:
    """Return the vote on requests, and their order sorted by ballots."""
    ballots = [request.ballot for request in requests]
    order = sorted(range(len(ballots)), key=ballots.__getitem__)
    in_order = ballot([ballots[position] for position in order])
    return ballots[0] + ballot(ballots) + in_order, order


def _common(own: bytes, order: list[int], votes: npt.NDArray[np.uint64]) -> list[int]:
    """Return the positions of requests that all members have, given the maxima of all votes."""
    # The maxima of hash and complement are both a member's own only if all hashes are equal.
    size, highest = len(own) // _HASHES, votes.tobytes()
    if highest[size : 2 * size] == own[size : 2 * size]:
        return list(range(len(order)))
    if highest[2 * size :] == own[2 * size :]:
        return order
    return [0] if highest[:size] == own[:size] else []


def agree_on_one(communicator: Communicator, own: bytes) -> bool:
    """Vote with a single request; return whether all members propose it next (collective).

    Other members may call `unanimous` in the same round.

    Args:
        communicator: communicator of the members.
        own: ballot of the only request of this member.
    """
    votes = np.frombuffer(bytearray(own * _HASHES), np.uint64)
    communicator.start_max(votes).wait()
    return votes.tobytes()[: len(own)] == own


def exchange(communicator: Communicator, items: Sequence[T]) -> list[list[T]]:
    """Return the items of every member, by rank (collective, blocking).

    Args:
        communicator: communicator of the members, all of which call this now.
        items: picklable objects of this member.
    """
    own = np.frombuffer(pickle.dumps(list(items)), np.uint8).copy()
    sizes = np.empty(communicator.size, np.int64)
    size = np.array([own.size])
    communicator.allgather(Buffer.from_array(size), Buffer.from_array(sizes), [1] * len(sizes))
    texts = np.empty(int(sizes.sum()), np.uint8)
    communicator.allgather(Buffer.from_array(own), Buffer.from_array(texts), sizes.tolist())
    parts = np.split(texts, np.cumsum(sizes)[:-1])
    return [pickle.loads(part.tobytes()) for part in parts]
