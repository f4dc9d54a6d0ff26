"""Messages between pairs of ranks, and operations in progress."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.polling import poll_until

__all__ = ["Pending", "PointToPoint"]


class Pending(ABC):
    """An operation in progress."""

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; return whether the operation is complete."""

    def wait(self) -> None:
        """Block until the operation is complete, without keeping a core busy."""
        poll_until(self.test)


class PointToPoint(ABC):
    """Messages between pairs of the ranks of a communicator, apart from its other calls.

    Messages from one rank to another with the same tag arrive in the order in which they were sent.
    One thread at a time uses it.
    """

    @abstractmethod
    def start_send(self, buffer: Buffer, rank: int, tag: int) -> Pending:
        """Start to send a buffer, which must not change until that is complete (local).

        Args:
            buffer: elements in host memory.
            rank: rank of the receiver among the members.
            tag: label of the message, 0 or more.
        """

    @abstractmethod
    def start_receive(self, buffer: Buffer, rank: int, tag: int) -> Pending:
        """Start to overwrite a buffer with a message (local).

        Args:
            buffer: host memory, of the type and size of the buffer that is sent.
            rank: rank of the sender among the members.
            tag: label of the message.
        """

    @abstractmethod
    def waiting(self, tag: int) -> int | None:
        """Return a rank from which a message can be received; None if there is none (local).

        Args:
            tag: label of the message.
        """

    @abstractmethod
    @collective
    def close(self) -> None:
        """Free its resources (collective)."""
