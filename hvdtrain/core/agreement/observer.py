"""The interface through which a channel reports its progress, e.g. to a timeline."""

from __future__ import annotations

from typing import Protocol

from hvdtrain.core.agreement.operation import Operation


class ChannelObserver(Protocol):
    """An observer of one channel, called in the thread in which the events happen."""

    def submitted(self, operation: Operation) -> None:
        """Record that this rank has submitted an operation."""

    def proposed(self, operation: Operation) -> None:
        """Record that an operation is proposed in a round."""

    def agreed(self) -> None:
        """Record that all ranks have agreed on the operations of a round."""

    def began(self, operation: Operation) -> None:
        """Record that an operation starts to run."""

    def ended(self, operation: Operation, error: BaseException | None = None) -> None:
        """Record that an operation has ended."""
