"""The state machine of a channel on one rank, and the decisions that it makes of reports (pure).

    OPEN ------- join submitted ------> JOINING --- all members have joined ---> OPEN
    OPEN, JOINING --- leave submitted -> LEAVING --- all members leave --------> CLOSED
    LEAVING, JOINING --- others wait for members that left: all requests fail -> OPEN
        (also those that a member has not submitted yet, when it does)
    any --- an engine call fails, or close() ----------------------------------> CLOSED

All members call the same primitives, because the actions of a round follow from votes and reports
that are the same on all of them. CLOSED is final: no round begins, and no request is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from hvdtrain.core.agreement.operation import JOIN, LEAVE, LISTEN, STEPS, Request
from hvdtrain.topology import format_ranks, shortened


@dataclass(frozen=True)
class Report:
    """The requests of one member, as it reports them to the others."""

    requests: tuple[Request, ...] = ()
    awaited: frozenset[str] = frozenset()
    joined_seconds: float = 0.0

    @property
    def blocked(self) -> bool:
        """Whether its program waits for other members; never true for one that has joined."""
        return bool(self.awaited) and JOIN not in self.requests


@dataclass(frozen=True)
class Decision:
    """The actions of a round, the same on all members; all of them may have joined, or leave."""

    run: tuple[Request, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    unmet: Mapping[str, str] = field(default_factory=dict)
    deserted: str = ""
    all_joined: bool = False
    all_leave: bool = False
    behind: frozenset[int] = frozenset()


@dataclass(frozen=True)
class JoinOrder:
    """What a channel knows of the order in which its members joined, the same on all of them."""

    ranks: tuple[int, ...]
    seconds: tuple[float, ...]
    behind: frozenset[int] = frozenset()


def decide(reports: Sequence[Report], ranks: Sequence[int]) -> Decision:
    """Decide which requests to run and which to fail.

    A request runs when all members that have not joined have submitted it, in the order of the
    first of these members. Requests of the same name that differ fail, including those that a
    member submitted before it joined. Nothing stays pending once all members have joined or all
    leave.
    """
    view = _View(reports, ranks)
    run: list[Request] = []
    mismatched: dict[str, str] = {}
    behind: frozenset[int] = frozenset()
    for member, request in view.candidates():
        if view.is_everywhere(request):  # the usual case
            run.append(request)
            continue
        sent = view.counterparts(request, member)
        if sent is None:
            continue
        behind |= view.joined.difference(sent)
        objection = view.objection(request, sent)
        if objection:
            mismatched.update({other.key: objection for other in sent.values()})
        else:
            run.append(request)
    if not view.active:
        return Decision(tuple(run), mismatched, all_joined=True, behind=behind)
    left = view.members_with(LEAVE)
    if len(left) == len(reports):
        settled = {LEAVE.key, *mismatched, *(request.key for request in run)}
        unmet = view.unmet(settled)
        return Decision(tuple(run), mismatched, unmet, all_leave=True, behind=behind)
    deserted = view.deserted(left) if left and not run and not mismatched else ""
    return Decision(tuple(run), mismatched, deserted=deserted, behind=behind)


def last_to_join(orders: Sequence[JoinOrder]) -> int:
    """Return the rank that joined last.

    A rank that missed an operation joined before those that took part in it. The times decide only
    among ranks that missed none: a busy machine delays the moment in which a rank measures its own.
    """
    seconds = dict(zip(orders[-1].ranks, orders[-1].seconds, strict=True))
    behind = frozenset[int]().union(*(order.behind for order in orders))
    last = [rank for rank in seconds if rank not in behind]
    return min(last or seconds, key=seconds.__getitem__)


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
        """Yield the requests that may run: those of the first active member, or else of all."""
        members = self.active[:1] or range(len(self._reports))
        seen = {JOIN.key, LEAVE.key}
        for member in members:
            for request in self._reports[member].requests:
                if request.key not in seen:
                    seen.add(request.key)
                    yield member, request

    def is_everywhere(self, request: Request) -> bool:
        # A report has the same object for equal requests.
        return all(theirs.get(request.key) is request for theirs in self._by_key)

    def counterparts(self, request: Request, owner: int) -> dict[int, Request] | None:
        """Return what each member submitted for a request; None if a member has not yet."""
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
        """Return why a request that all members have submitted cannot run, or ""."""
        if any(other != request for other in sent.values()):
            texts = [
                f"{self._names(m for m, other in sent.items() if other == kind)} sent {kind}"
                for kind in dict.fromkeys(sent.values())
            ]
            return f"{shortened(texts, '; ', ' requests')}. {self._remedy(sent)}"
        absent = self.joined.difference(sent)
        if absent and request.zeros is None:
            reason = request.instead or (
                "a joined rank has nothing to contribute to this operation. Let every rank call "
                "it, or call it before join()"
            )
            return f"{self._names(absent)} joined, and {reason}"
        return ""

    def _remedy(self, sent: Mapping[int, Request]) -> str:
        details = {member: dict(request.details) for member, request in sent.items()}
        steps = {member: int(own.pop(STEPS, 0)) for member, own in details.items()}
        rest = [(sent[member].operation, own) for member, own in details.items()]
        if any(other != rest[0] for other in rest):
            return "Submit the same operation on every rank"
        behind = self._names(m for m, count in steps.items() if count == min(steps.values()))
        return (
            f"A step is missing on {behind}: gradients were discarded there by zero_grad() or set "
            "to None, or step() was not called. Let all ranks skip a step or none; a rank whose "
            "gradients shall not count sets optimizer.sample_weight = 0"
        )

    def unmet(self, settled: set[str]) -> dict[str, str]:
        """Return why requests that are still pending when all members leave do not run."""
        keys = dict.fromkeys(key for theirs in self._by_key for key in theirs)
        return {
            key: f"{self._names(m for m, theirs in enumerate(self._by_key) if key not in theirs)} "
            "left without it. Let every rank submit the same operations before it leaves"
            for key in keys
            if key not in settled
        }

    def deserted(self, left: frozenset[int]) -> str:
        """Return why members wait for others that have left, or ""."""
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
    """Return what a member submitted for `request`, possibly another operation of that name."""
    same = theirs.get(request.key)
    if same is not None or not request.name:
        return same
    namesakes = (r for r in theirs.values() if r.name == request.name and r.key not in ours)
    return next(namesakes, None)


class Phase(Enum):
    """The phase of a channel's lifecycle."""

    OPEN = auto()
    JOINING = auto()
    LEAVING = auto()
    CLOSED = auto()


@dataclass(frozen=True)
class ChannelState:
    """The state of a channel on one rank."""

    size: int
    phase: Phase = Phase.OPEN
    reason: str = "shut down"
    behind: frozenset[int] = frozenset()
    lost: bool = False
    deserted: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Submitted:
    request: Request


@dataclass(frozen=True)
class RoundBegan:
    """A round begins, because requests are pending or there is a listener."""

    pending: tuple[Request, ...]
    listening: bool


@dataclass(frozen=True)
class Voted:
    """A vote has ended: `agreed` are those of the proposed requests that all members proposed."""

    proposed: tuple[Request, ...]
    agreed: tuple[Request, ...]


@dataclass(frozen=True)
class ReportsExchanged:
    reports: tuple[Report, ...]
    ranks: tuple[int, ...]
    own: Report


@dataclass(frozen=True)
class Left:
    """All members have left, and all actions before that are done."""


@dataclass(frozen=True)
class Failed:
    """An engine call failed or was interrupted: other members may be blocked in it forever."""

    reason: str
    lost: bool = False


@dataclass(frozen=True)
class Closed:
    """The program closes the channel."""


Event = Submitted | RoundBegan | Voted | ReportsExchanged | Left | Failed | Closed


@dataclass(frozen=True)
class Refuse:
    reason: str
    lost: bool = False
    deserted: bool = False


@dataclass(frozen=True)
class Vote:
    """Vote with all members on which of these requests they have in common."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class ExchangeReports:
    """Exchange reports of the pending requests with all members."""


@dataclass(frozen=True)
class RunRequests:
    """Run requests in this order, contributing zeros to those that are not pending here."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Fail:
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Leave:
    """Leave, and fail the requests with these keys: all members leave."""

    unmet: Mapping[str, str]


@dataclass(frozen=True)
class FailAll:
    reason: str


@dataclass(frozen=True)
class EndJoin:
    """End the join, because all members have joined in this order."""

    order: JoinOrder


@dataclass(frozen=True)
class Notify:
    """Notify the listeners that these ranks are blocked."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class BackOff:
    """Wait for a new request or for some time, because no request could run."""


Action = (
    Refuse
    | Vote
    | ExchangeReports
    | RunRequests
    | Fail
    | Leave
    | FailAll
    | EndJoin
    | Notify
    | BackOff
)


def transition(state: ChannelState, event: Event) -> tuple[ChannelState, tuple[Action, ...]]:
    """Return the next state and the actions to perform, in order.

    Some actions lead to an event: Vote to Voted, ExchangeReports to ReportsExchanged, and Leave
    to Left.
    """
    if isinstance(event, Submitted):
        return _submitted(state, event.request)
    if state.phase is Phase.CLOSED:
        return state, ()
    if isinstance(event, RoundBegan):
        requests = event.pending or ((LISTEN,) if event.listening else ())
        return state, (Vote(requests),) if requests else ()
    if isinstance(event, Voted):
        return state, _voted(state, event)
    if isinstance(event, ReportsExchanged):
        return _told(state, event)
    if isinstance(event, Left):
        return replace(state, phase=Phase.CLOSED), ()
    if isinstance(event, Failed):
        state = replace(state, reason=event.reason, lost=event.lost)
    return replace(state, phase=Phase.CLOSED), (FailAll(state.reason),)


def _submitted(state: ChannelState, request: Request) -> tuple[ChannelState, tuple[Action, ...]]:
    if state.phase is Phase.LEAVING or state.phase is Phase.CLOSED:
        return state, (Refuse(state.reason, state.lost),)
    missed = dict(state.deserted)
    reason = missed.pop(request.key, "")
    if reason:
        return replace(state, deserted=tuple(missed.items())), (Refuse(reason, deserted=True),)
    if request is LEAVE:
        return replace(state, phase=Phase.LEAVING), ()
    if request is JOIN:
        return replace(state, phase=Phase.JOINING), ()
    return state, ()


def _voted(state: ChannelState, event: Voted) -> tuple[Action, ...]:
    agreed = event.agreed
    if not agreed:
        return (ExchangeReports(),)
    if agreed[0] is LISTEN:
        return (BackOff(),)
    if state.phase is Phase.OPEN:  # neither JOIN nor LEAVE is pending
        return (RunRequests(agreed),)
    if JOIN in agreed:
        return (ExchangeReports(),)
    if LEAVE not in agreed:
        return (RunRequests(agreed),)
    # LEAVE is the last request whatever the order of the vote: none is accepted after it.
    return (RunRequests(tuple(request for request in agreed if request != LEAVE)), Leave({}))


def _told(state: ChannelState, event: ReportsExchanged) -> tuple[ChannelState, tuple[Action, ...]]:
    decision = decide(event.reports, event.ranks)
    if decision.deserted:
        # All reported requests fail; there may be newer ones. A rank that takes part submits the
        # others' requests later, when nobody answers any more.
        marker = LEAVE if state.phase is Phase.LEAVING else JOIN
        own = event.own.requests
        missed = dict(state.deserted)
        if LEAVE not in own and JOIN not in own:
            theirs = {request.key for report in event.reports for request in report.requests}
            known = {request.key for request in (*own, JOIN, LEAVE)}
            missed.update(dict.fromkeys(sorted(theirs - known), decision.deserted))
        phase = Phase.OPEN if marker in own else state.phase
        after = ChannelState(state.size, phase, deserted=tuple(missed.items()))
        return after, (FailAll(decision.deserted),)
    actions: list[Action] = []
    # Requests of all members run now, and the next round shows which members are still blocked.
    pairs = zip(event.ranks, event.reports, strict=True)
    blocked = tuple(rank for rank, report in pairs if report.blocked)
    if blocked and not decision.run:
        actions.append(Notify(blocked))
    if decision.mismatched:
        actions.append(Fail(decision.mismatched))
    if decision.run:
        actions.append(RunRequests(decision.run))
    if decision.all_leave:
        return state, (*actions, Leave(decision.unmet))
    if decision.all_joined:
        seconds = tuple(report.joined_seconds for report in event.reports)
        behind = frozenset(event.ranks[member] for member in state.behind | decision.behind)
        order = JoinOrder(event.ranks, seconds, behind)
        phase = Phase.OPEN if state.phase is Phase.JOINING else state.phase
        return ChannelState(state.size, phase), (*actions, EndJoin(order))
    if not (decision.run or decision.mismatched):
        actions.append(BackOff())
    return replace(state, behind=state.behind | decision.behind), tuple(actions)
