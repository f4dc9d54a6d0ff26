"""The exchange of reports, between threads that stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
from meeting_engine import Group, MeetingCommunicator, Referee

from hvdtrain.core.agreement.decision import Report
from hvdtrain.core.agreement.driver import ReportExchange
from hvdtrain.core.agreement.request import Request

HANGS_AFTER_SECONDS = 60


def report(numbers: Iterable[int], prefix: str = "x", joined_seconds: float = 0.0) -> Report:
    requests = [Request("allreduce", f"{prefix} {n}", (("shape", str(n)),)) for n in numbers]
    awaited = frozenset(request.key for request in requests[::2])
    return Report(tuple(requests), awaited, joined_seconds)


class Ranks:
    """Ranks that exchange reports."""

    def __init__(self, size: int) -> None:
        self._referee = Referee()
        group = Group(self._referee, size, "world")
        self._ways = [ReportExchange(MeetingCommunicator(group, r, True)) for r in range(size)]

    def exchange(self, own: list[Report]) -> list[tuple[Report, ...]]:
        """Exchange a report of each rank; return what each rank received."""
        received: dict[int, tuple[Report, ...]] = {}

        def run(rank: int) -> None:
            received[rank] = self._ways[rank](own[rank])

        threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(own))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_AFTER_SECONDS)
        assert self._referee.faults == []
        return [received[rank] for rank in range(len(own))]


# The last does not fit into the first block, even if all of its requests have numbers.
@pytest.mark.parametrize("count", [0, 1, 2, 50, 300])
def test_requests_that_overlap_are_the_same_everywhere(count: int) -> None:
    ranks = Ranks(3)
    for shift in (0, 0, 1, 2):
        own = [report(range(r * shift, count + r), joined_seconds=r / 3) for r in range(3)]
        for received in ranks.exchange(own):
            assert list(received) == own
            requests = {request.key: request for theirs in received for request in theirs.requests}
            assert all(requests[q.key] is q for theirs in received for q in theirs.requests)


def test_names_that_change_do_not_fill_the_memory() -> None:
    ranks = Ranks(2)
    for step in range(6):
        own = [report(range(1000), f"step {step}"), report(range(500, 1500), f"step {step}")]
        assert all(list(received) == own for received in ranks.exchange(own))
    assert len(ranks._ways[0]._requests) < 6 * 1500
