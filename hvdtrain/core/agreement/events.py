"""The states, events and actions of a channel's state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from hvdtrain.core.agreement.decision import JoinOrder, Report
from hvdtrain.core.agreement.request import Request


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
    """The program has submitted a request."""

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
    """The members have exchanged their reports."""

    reports: tuple[Report, ...]
    ranks: tuple[int, ...]
    own: Report


@dataclass(frozen=True)
class Left:
    """All members have left, and all actions before that are done."""


@dataclass(frozen=True)
class Failed:
    """An engine call failed or was interrupted: other members may be blocked in it for ever."""

    reason: str
    lost: bool = False


@dataclass(frozen=True)
class Closed:
    """The program closes the channel."""


Event = Submitted | RoundBegan | Voted | ReportsExchanged | Left | Failed | Closed


@dataclass(frozen=True)
class Refuse:
    """Refuse the request that was submitted."""

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
    """Fail the requests with these keys that are pending here."""

    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Leave:
    """Leave, and fail the requests with these keys: all members leave."""

    unmet: Mapping[str, str]


@dataclass(frozen=True)
class FailAll:
    """Fail all pending requests."""

    reason: str


@dataclass(frozen=True)
class EndJoin:
    """End the join, because all members have joined in this order."""

    order: JoinOrder


@dataclass(frozen=True)
class Notify:
    """Notify the listeners that another member is blocked."""


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
