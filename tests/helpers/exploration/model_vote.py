"""The vote of production, for requests that a model's members propose."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from explorer import Fault

from hvdtrain.core.agreement.request import Request
from hvdtrain.core.agreement.votes import agree_on_one, unanimous
from hvdtrain.engines.local import LocalCommunicator, _Done


class _Ballots(LocalCommunicator):
    """Takes the votes of one member; gives it the highest of all members' when these are known."""

    def __init__(self) -> None:
        super().__init__()
        self.own: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.highest: npt.NDArray[np.uint64] | None = None

    def start_max(self, values: npt.NDArray[np.uint64]) -> _Done:
        self.own = values.copy()
        if self.highest is not None:
            values[:] = self.highest
        return _Done()


@cache
def vote(proposed: tuple[tuple[Request, ...], ...]) -> list[tuple[Request, ...]]:
    """Return what production's vote tells each member about these proposals."""
    members = [_Ballots() for _ in proposed]
    for member, requests in zip(members, proposed, strict=True):
        unanimous(member, requests)
    highest = np.maximum.reduce([member.own for member in members])
    results = []
    for member, requests in zip(members, proposed, strict=True):
        member.highest = highest
        results.append(tuple(requests[place] for place in unanimous(member, requests)))
        if len(requests) == 1:
            _compare_with_prepared(member, requests[0], bool(results[-1]))
    return results


def _compare_with_prepared(member: _Ballots, request: Request, agreed: bool) -> None:
    """Require of a prepared vote that it sends the same, and comes to the same result."""
    sent = member.own.copy()
    if agree_on_one(member, request.ballot) != agreed or not np.array_equal(member.own, sent):
        raise Fault(f"a prepared vote on {request} differs from the usual one")
