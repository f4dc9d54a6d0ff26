"""How ranks agree on what comes next, though they may submit requests in different orders.

Nearly always they do agree. In a round three small hashes go out from every rank in a non-blocking
MIN/MAX all-reduce: of its next request, of all its requests, and of all of them sorted. Only when
all differ are the full requests exchanged.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.request import JOIN, LEAVE, Request, ballot
from hvdtrain.engines.communicator import Communicator

__all__ = ["Decision", "decide", "exchange", "unanimous"]

T = TypeVar("T")


def unanimous(communicator: Communicator, requests: Sequence[Request]) -> list[int]:
    """Block until every member has a next request; tell which are the same (collective).

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


@dataclass(frozen=True)
class Decision:
    """What all members do after an exchange; the same on each of them.

    Attributes:
        run: requests to run now, in this order.
        failed: for the keys of requests that cannot be run the reason.
        deserted: the reason why all waiting requests are hopeless, or "".
        all_joined: whether every member has joined.
        joined: members that have joined.
    """

    run: list[Request] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    deserted: str = ""
    all_joined: bool = False
    joined: frozenset[int] = frozenset()


def decide(requests: Sequence[Sequence[Request]], ranks: Sequence[int]) -> Decision:
    """Choose what to run from the requests of every member, in its order of submission.

    A request runs when every member that has not joined has submitted it; the order is that of
    the first such member. Requests of one name that differ fail, those included that a member
    submitted before it joined.

    Args:
        requests: of each member.
        ranks: the members' numbers in the world, for messages.
    """
    joined = frozenset(member for member, own in enumerate(requests) if JOIN in own)
    active = [member for member in range(len(requests)) if member not in joined]
    if not active:
        return Decision(all_joined=True, joined=joined)
    by_key = [{request.key: request for request in own} for own in requests]
    decision = Decision(joined=joined)
    for request in requests[active[0]]:
        if request == LEAVE:
            continue
        # Nearly always; texts that are equal are unpacked to one object.
        if all(by_key[member].get(request.key) is request for member in active) and not joined:
            decision.run.append(request)
            continue
        absent = sorted(member for member in joined if request.key not in by_key[member])
        sent = {
            member: _counterpart(request, by_key[member], by_key[active[0]])
            for member in range(len(requests))
            if member not in absent
        }
        if any(other is None for other in sent.values()):
            continue
        same = {ranks[member]: other for member, other in sent.items() if other is not None}
        objection = _objection(request, same, [ranks[member] for member in absent])
        if objection:
            decision.failed.update({other.key: objection for other in same.values()})
        else:
            decision.run.append(request)
    left = [member for member, own in enumerate(requests) if LEAVE in own]
    # A member that submits nothing only listens, and does not wait for those that leave.
    if left and all(requests) and not decision.run and not decision.failed:
        if len(left) == len(requests):
            return Decision(run=[LEAVE])
        waiting = sorted({own[0].subject for own in requests if own and LEAVE not in own})
        return Decision(
            deserted=f"{_list([ranks[member] for member in left])} left the job while others were "
            f"in {', '.join(waiting)}. Let every rank run the same number of steps and end together"
        )
    return decision


def _counterpart(
    request: Request, theirs: Mapping[str, Request], ours: Mapping[str, Request]
) -> Request | None:
    """Find what a member submitted for `request`, be it another operation of that name."""
    same = theirs.get(request.key)
    if same is not None or not request.name:
        return same
    namesakes = (r for r in theirs.values() if r.name == request.name and r.key not in ours)
    return next(namesakes, None)


def _objection(request: Request, sent: Mapping[int, Request], joined: list[int]) -> str:
    if any(other != request for other in sent.values()):
        texts = "; ".join(
            f"{_list([r for r, other in sent.items() if other == kind])} sent {kind}"
            for kind in dict.fromkeys(sent.values())
        )
        return f"{texts}. Submit the same operation on every rank"
    if joined and request.zeros is None:
        return (
            f"{_list(joined)} joined, and a joined rank has nothing to contribute to this "
            "operation. Let every rank call it, or call it before join()"
        )
    return ""


def _list(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
