"""What a channel reports while it works, to a timeline for example."""

from __future__ import annotations

from typing import Protocol

from hvdtrain.core.agreement.operation import Operation

__all__ = ["ChannelObserver"]


class ChannelObserver(Protocol):
    """Receives the events of one channel, in the thread in which they happen."""

    def submitted(self, operation: Operation) -> None:
        """Note that this rank has submitted an operation."""

    def proposed(self, operation: Operation) -> None:
        """Note that an operation takes part in a round."""

    def agreed(self) -> None:
        """Note that a round has ended, and all ranks have agreed on what to run."""

    def began(self, operation: Operation) -> None:
        """Note that an operation starts to run."""

    def ended(self, operation: Operation, error: BaseException | None = None) -> None:
        """Note that an operation has ended, with an error if it failed."""
