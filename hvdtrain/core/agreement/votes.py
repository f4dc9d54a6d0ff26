"""The vote of a round, and the exchange of objects if it fails.

Members nearly always have the same requests. In each round a non-blocking MAX all-reduce compares
three small hashes of every member: of its next request, of all its requests, and of all its
requests sorted. Full requests are exchanged only if all three differ.
"""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from struct import Struct
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request, ballot
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.features import Verdict

T = TypeVar("T")

# The hashes of a vote; for a single request they are equal.
_HASHES = 3

# What `gather_bytes` sends first, and the number of bytes in it.
_BLOCK_BYTES = 512
_SIZE = Struct("=q")


@collective
def unanimous(communicator: Communicator, requests: Sequence[Request]) -> list[int]:
    """Wait until every member votes, and find the requests in common."""
    own, order = _hashed(requests)
    votes = np.frombuffer(bytearray(own), np.uint64)
    communicator.start_max(votes).wait()
    return _common(own, order, votes)


def vote_on_batch(
    communicator: Communicator, operations: Sequence[Operation]
) -> tuple[list[int], bool]:
    """Do what `unanimous` does, and run the operations if all members vote so for the same set."""
    own, order = _hashed([operation.request for operation in operations])
    votes = np.frombuffer(bytearray(own), np.uint64)
    first, *others = [operations[position] for position in order]
    if first.vote_on_batch(others, communicator, votes):
        return order, True
    return _common(own, order, votes), False


def _hashed(requests: Sequence[Request]) -> tuple[bytes, list[int]]:
    """Return the vote on requests, and their order sorted by ballots."""
    return _vote_on(tuple([request.ballot for request in requests]))


# A training loop submits the same requests again and again.
@lru_cache(maxsize=64)
def _vote_on(ballots: tuple[bytes, ...]) -> tuple[bytes, list[int]]:
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


@collective
def agree_on_one(communicator: Communicator, own: bytes) -> bool:
    """Vote with one request, as `unanimous` does; return whether all members propose it next."""
    votes = np.frombuffer(bytearray(own * _HASHES), np.uint64)
    communicator.start_max(votes).wait()
    return votes.tobytes()[: len(own)] == own


@collective
def exchange(communicator: Communicator, items: Sequence[T]) -> list[list[T]]:
    """Return the items of every member, by rank."""
    return [pickle.loads(text) for text in gather_bytes(communicator, pickle.dumps(list(items)))]


@collective
def gather_bytes(communicator: Communicator, own: bytes) -> list[bytes]:
    """Return the bytes of every member, by rank, with one call of the engine for few of them."""
    room = _BLOCK_BYTES - _SIZE.size
    block = (_SIZE.pack(len(own)) + own[:room]).ljust(_BLOCK_BYTES, b"\0")
    blocks = _gather(communicator, block, [_BLOCK_BYTES] * communicator.size)
    sizes = [_SIZE.unpack_from(theirs)[0] for theirs in blocks]
    firsts = [b[_SIZE.size : _SIZE.size + n] for b, n in zip(blocks, sizes, strict=True)]
    if max(sizes) <= room:
        return firsts
    rests = _gather(communicator, own[room:], [max(size - room, 0) for size in sizes])
    return [first + rest for first, rest in zip(firsts, rests, strict=True)]


def _gather(communicator: Communicator, own: bytes, counts: list[int]) -> list[bytes]:
    texts = np.empty(sum(counts), np.uint8)
    send = np.array(bytearray(own), np.uint8)  # which may be empty
    communicator.allgather(Buffer.from_array(send), Buffer.from_array(texts), counts)
    whole, ends = texts.tobytes(), list(accumulate(counts))
    return [whole[end - count : end] for end, count in zip(ends, counts, strict=True)]


class Prepared(Operation):
    """An operation that differs from call to call in its data, and in its number if it has no name.

    In the queue it stands for the operation while the members vote. One call at a time uses it.
    """

    def __init__(self, request: Request, next_name: Callable[[], str] | None = None) -> None:
        super().__init__()
        self.request, self.ballot = request, request.ballot
        self.waiters = 1  # the caller
        self._next_name = next_name

    def renew(self) -> None:
        self.submitted = time.perf_counter()
        if self._next_name is not None:
            self.request = self.next_request()
            self.ballot = self.request.ballot

    def next_request(self) -> Request:
        return self.request if self._next_name is None else self.request.renamed(self._next_name())

    @collective
    def vote(self, communicator: Communicator, data: Any) -> Verdict:
        """Vote on the operation, and run it at once if that is possible."""
        agreed = agree_on_one(communicator, self.ballot)
        return Verdict.AGREED if agreed else Verdict.DIFFERENT

    @abstractmethod
    def operation(self, data: Any) -> Operation:
        """Return the operation of this call, which then takes this one's place."""

    def execute(self, communicator: Communicator) -> Any:
        raise NotImplementedError  # another operation takes its place before anything runs
