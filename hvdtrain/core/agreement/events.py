"""What happens on a channel, and what is to be done for it: the words of its state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from hvdtrain.core.agreement.decision import Report
from hvdtrain.core.agreement.request import Request

__all__ = [
    "Action",
    "BackOff",
    "ChannelState",
    "Closed",
    "EndJoin",
    "Event",
    "ExchangeReports",
    "Fail",
    "FailAll",
    "Failed",
    "Leave",
    "Left",
    "Notify",
    "Phase",
    "Refuse",
    "ReportsExchanged",
    "RoundBegan",
    "RunRequests",
    "Submitted",
    "Vote",
    "Voted",
]


class Phase(Enum):
    """Where a channel is in its life."""

    OPEN = auto()
    JOINING = auto()
    LEAVING = auto()
    CLOSED = auto()


@dataclass(frozen=True)
class ChannelState:
    """What one rank knows of its channel.

    Attributes:
        size: how many members there are.
        phase: where the channel is in its life.
        reason: why it is closed.
        joined: members that had joined at the last exchange.
    """

    size: int
    phase: Phase = Phase.OPEN
    reason: str = "shut down"
    joined: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Submitted:
    """The program asks for something."""

    request: Request


@dataclass(frozen=True)
class RoundBegan:
    """There may be something to do: these requests are pending, or somebody listens."""

    pending: tuple[Request, ...]
    listening: bool


@dataclass(frozen=True)
class Voted:
    """Of the requests that this rank proposed, these are the same on all members."""

    proposed: tuple[Request, ...]
    agreed: tuple[Request, ...]


@dataclass(frozen=True)
class ReportsExchanged:
    """Every member has said what is pending there.

    Attributes:
        reports: of each member.
        ranks: their numbers in the world.
        own: this rank's report.
    """

    reports: tuple[Report, ...]
    ranks: tuple[int, ...]
    own: Report


@dataclass(frozen=True)
class Left:
    """All that was to be done before all members left is done."""


@dataclass(frozen=True)
class Failed:
    """An engine call failed, or was interrupted: other members may be inside it for ever."""

    reason: str


@dataclass(frozen=True)
class Closed:
    """The channel is given back."""


Event = Submitted | RoundBegan | Voted | ReportsExchanged | Left | Failed | Closed


@dataclass(frozen=True)
class Refuse:
    """Do not take what was submitted."""

    reason: str


@dataclass(frozen=True)
class Vote:
    """Find out with all members which of these requests are the same."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class ExchangeReports:
    """Tell all members what is pending here."""


@dataclass(frozen=True)
class RunRequests:
    """Run these with all members, in this order; with zeros what is not pending here."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Fail:
    """Fail the requests with these keys, where they are pending here."""

    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Leave:
    """Fail what is still pending, with the reasons for these keys: all members have left."""

    unmet: Mapping[str, str]


@dataclass(frozen=True)
class FailAll:
    """Fail all that is pending, which other ranks are to blame for."""

    reason: str


@dataclass(frozen=True)
class EndJoin:
    """All members have joined; `last` is the rank that came last."""

    last: int


@dataclass(frozen=True)
class Notify:
    """Tell who listens that another member is blocked."""


@dataclass(frozen=True)
class BackOff:
    """Nothing could be done: wait for news, or for some time."""


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
