"""The vote of a round, and the exchange of objects if it fails.

Members nearly always have the same requests. In each round a non-blocking MAX all-reduce compares
three small hashes of every member: of its next request, of all its requests, and of all its
requests sorted. Full requests are exchanged only if all three differ.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from struct import Struct
from typing import TypeVar

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Operation, ballot, maxima
from hvdtrain.engines.communicator import Communicator
from hvdtrain.streams import HOST

T = TypeVar("T")

# The hashes of a vote; for a single request they are equal.
HASHES = 3

# What `gather_bytes` sends first, and the number of bytes in it.
_BLOCK_BYTES = 512
_SIZE = Struct("=q")


@collective
def vote(
    communicator: Communicator, operations: Sequence[Operation], at_once: bool
) -> tuple[list[int], bool]:
    """Wait until every member votes, and find the operations in common, by their positions.

    With `at_once` they are run by the vote, if that is possible. Return whether they are done.
    """
    own, order = _vote_on(tuple([operation.request.ballot for operation in operations]))
    if at_once and _is_batch(operations):
        first, *others = [operations[position] for position in order]
        highest = first.vote(others, communicator, own)
    else:
        highest = maxima(communicator, own)
    return (common(own, order, highest), False) if highest else (order, True)


def _is_batch(operations: Sequence[Operation]) -> bool:
    """Return whether operations can run as one, or are one; on a device they do not."""
    key = operations[0].batch_key
    return len(operations) == 1 or (
        key is not None and all(o.batch_key == key and o.streams is HOST for o in operations)
    )


# A training loop submits the same requests again and again.
@lru_cache(maxsize=64)
def _vote_on(ballots: tuple[bytes, ...]) -> tuple[bytes, list[int]]:
    order = sorted(range(len(ballots)), key=ballots.__getitem__)
    in_order = ballot([ballots[position] for position in order])
    return ballots[0] + ballot(ballots) + in_order, order


def common(own: bytes, order: list[int], highest: bytes) -> list[int]:
    """Return the positions of requests that all members have, given the maxima of all votes."""
    # The maxima of hash and complement are both a member's own only if all hashes are equal.
    size = len(own) // HASHES
    if highest[size : 2 * size] == own[size : 2 * size]:
        return list(range(len(order)))
    if highest[2 * size :] == own[2 * size :]:
        return order
    return [0] if highest[:size] == own[:size] else []


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
