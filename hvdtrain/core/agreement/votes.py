"""How members find out whether they ask for the same, and tell one another what they ask for.

Nearly always they do agree. In a round three small hashes go out from every member in a
non-blocking MIN/MAX all-reduce: of its next request, of all its requests, and of all of them
sorted. Only when all differ are the full requests exchanged.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.request import Request, ballot
from hvdtrain.engines.communicator import Communicator

__all__ = ["exchange", "unanimous"]

T = TypeVar("T")


def unanimous(communicator: Communicator, requests: Sequence[Request]) -> list[int]:
    """Block until every member has a next request; return which are the same (collective).

    Args:
        communicator: of the members.
        requests: this member's, at least one, in the order of submission.

    Returns:
        Positions in `requests`, for the same requests on all members. All of them where all
        members have these and no other, in the order of submission if that is the same; the
        first where only that is the same; else none.
    """
    ballots = [request.ballot for request in requests]
    head, whole, ordered = ballots[0], ballot(ballots), sorted(ballots)
    own = head + whole + ballot(ordered)
    votes = np.frombuffer(bytearray(own), np.uint64)
    communicator.start_max(votes).wait()
    # Of a hash and of its complement the maximum is one's own only if nobody's differs.
    size, highest = len(head), votes.tobytes()
    if highest[size : 2 * size] == whole:
        return list(range(len(requests)))
    if highest[2 * size :] == own[2 * size :]:
        return sorted(range(len(requests)), key=ballots.__getitem__)
    return [0] if highest[:size] == head else []


def exchange(communicator: Communicator, items: Sequence[T]) -> list[list[T]]:
    """Return the items of every member, by rank (collective; all members are there)."""
    own = np.frombuffer(pickle.dumps(list(items)), np.uint8).copy()
    sizes = np.empty(communicator.size, np.int64)
    size = np.array([own.size])
    communicator.allgather(Buffer.from_array(size), Buffer.from_array(sizes), [1] * len(sizes))
    texts = np.empty(int(sizes.sum()), np.uint8)
    communicator.allgather(Buffer.from_array(own), Buffer.from_array(texts), sizes.tolist())
    parts = np.split(texts, np.cumsum(sizes)[:-1])
    return [pickle.loads(part.tobytes()) for part in parts]
