"""What all members do after they have told one another what they ask for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvdtrain.core.agreement.request import JOIN, LEAVE, Request
from hvdtrain.topology import format_ranks

__all__ = ["Decision", "Ending", "Report", "decide"]


@dataclass(frozen=True)
class Report:
    """What one member tells the others.

    Attributes:
        requests: all that are under way there, in the order of submission.
        awaited: the keys of those that a thread of its program waits for now.
        joined_seconds: how long ago it joined, if it has.
    """

    requests: tuple[Request, ...] = ()
    awaited: frozenset[str] = frozenset()
    joined_seconds: float = 0.0

    @property
    def blocked(self) -> bool:
        """Whether its program can do nothing else until others come; a joined one's need not."""
        return bool(self.awaited) and JOIN not in self.requests


class Ending(Enum):
    """What ends for all members, after what is run and failed."""

    NONE = "none"
    JOIN = "join"
    LEAVE = "leave"


@dataclass(frozen=True)
class Decision:
    """What all members do; the same on each of them.

    Attributes:
        run: requests to run now, in this order.
        mismatched: for the keys of requests that differ between members the reason.
        unmet: for the keys of requests that not all members came to, before all left, the reason.
        deserted: why all that is under way is hopeless, or "".
        ending: what ends for all.
        joined: members that have joined.
    """

    run: tuple[Request, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    unmet: Mapping[str, str] = field(default_factory=dict)
    deserted: str = ""
    ending: Ending = Ending.NONE
    joined: frozenset[int] = frozenset()


def decide(reports: Sequence[Report], ranks: Sequence[int]) -> Decision:
    """Choose what to run from the requests of every member.

    A request runs when every member that has not joined has submitted it; the order is that of
    the first such member. Requests of one name that differ fail, those included that a member
    submitted before it joined. Once all members have joined, or all leave, nothing stays pending.

    Args:
        reports: of each member.
        ranks: the members' numbers in the world, for messages.
    """
    view = _View(reports, ranks)
    run: list[Request] = []
    mismatched: dict[str, str] = {}
    for member, request in view.candidates():
        if view.is_everywhere(request):
            run.append(request)
            continue
        sent = view.counterparts(request, member)
        if sent is None:
            continue
        objection = view.objection(request, sent)
        if objection:
            mismatched.update({other.key: objection for other in sent.values()})
        else:
            run.append(request)
    if not view.active:
        return Decision(tuple(run), mismatched, ending=Ending.JOIN, joined=view.joined)
    left = view.members_with(LEAVE)
    if len(left) == len(reports):
        settled = {LEAVE.key, *mismatched, *(request.key for request in run)}
        return Decision(
            tuple(run), mismatched, view.unmet(settled), ending=Ending.LEAVE, joined=view.joined
        )
    deserted = view.deserted(left) if left and not run and not mismatched else ""
    return Decision(tuple(run), mismatched, deserted=deserted, joined=view.joined)


class _View:
    """The reports of all members, by key."""

    def __init__(self, reports: Sequence[Report], ranks: Sequence[int]) -> None:
        self._reports, self._ranks = reports, ranks
        self._by_key = [{request.key: request for request in own.requests} for own in reports]
        self.joined = self.members_with(JOIN)
        self.active = [member for member in range(len(reports)) if member not in self.joined]

    def members_with(self, request: Request) -> frozenset[int]:
        return frozenset(m for m, theirs in enumerate(self._by_key) if request.key in theirs)

    def candidates(self) -> Iterator[tuple[int, Request]]:
        """Return what may run: what the first active member has, or what any has if none is."""
        members = self.active[:1] or range(len(self._reports))
        seen = {JOIN.key, LEAVE.key}
        for member in members:
            for request in self._reports[member].requests:
                if request.key not in seen:
                    seen.add(request.key)
                    yield member, request

    def is_everywhere(self, request: Request) -> bool:
        """Return whether all members have this very request, which is nearly always so."""
        # Texts that are equal are unpacked to one object.
        return all(theirs.get(request.key) is request for theirs in self._by_key)

    def counterparts(self, request: Request, owner: int) -> dict[int, Request] | None:
        """Return what the members submitted for `request`; None while one has yet to come."""
        sent: dict[int, Request] = {}
        ours = self._by_key[owner]
        for member, theirs in enumerate(self._by_key):
            other = _counterpart(request, theirs, ours)
            if other is not None:
                sent[member] = other
            elif member not in self.joined:
                return None
        return sent

    def objection(self, request: Request, sent: Mapping[int, Request]) -> str:
        """Return why a request that no member keeps waiting cannot run, or ""."""
        if any(other != request for other in sent.values()):
            texts = "; ".join(
                f"{self._names(m for m, other in sent.items() if other == kind)} sent {kind}"
                for kind in dict.fromkeys(sent.values())
            )
            return f"{texts}. Submit the same operation on every rank"
        absent = self.joined.difference(sent)
        if absent and request.zeros is None:
            return (
                f"{self._names(absent)} joined, and a joined rank has nothing to contribute to "
                "this operation. Let every rank call it, or call it before join()"
            )
        return ""

    def unmet(self, settled: set[str]) -> dict[str, str]:
        """Return why requests do not run that are left when all members leave."""
        keys = dict.fromkeys(key for theirs in self._by_key for key in theirs)
        return {
            key: f"{self._names(m for m, theirs in enumerate(self._by_key) if key not in theirs)} "
            "left without it. Let every rank submit the same operations before it leaves"
            for key in keys
            if key not in settled
        }

    def deserted(self, left: frozenset[int]) -> str:
        """Return why members wait in vain for others that leave, or ""."""
        hopeless = {
            request.subject
            for member, report in enumerate(self._reports)
            if member not in left
            for request in report.requests
            if request.key in report.awaited and self._is_hopeless(request, left)
        }
        if not hopeless:
            return ""
        return (
            f"{self._names(left)} left the job while others were in {', '.join(sorted(hopeless))}"
            ". Let every rank run the same number of steps and end together"
        )

    def _is_hopeless(self, request: Request, left: frozenset[int]) -> bool:
        return any(
            request.key not in self._by_key[member]
            and (member not in self.joined or request.zeros is None)
            for member in left
        )

    def _names(self, members: Iterable[int]) -> str:
        return format_ranks(self._ranks[member] for member in members)


def _counterpart(
    request: Request, theirs: Mapping[str, Request], ours: Mapping[str, Request]
) -> Request | None:
    """Find what a member submitted for `request`, be it another operation of that name."""
    same = theirs.get(request.key)
    if same is not None or not request.name:
        return same
    namesakes = (r for r in theirs.values() if r.name == request.name and r.key not in ours)
    return next(namesakes, None)
