"""What the members of a channel do together, and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.request import Request
from hvdtrain.core.timeline.times import BucketTimes
from hvdtrain.engines.communicator import Communicator

__all__ = ["Farewell", "Operation"]


class Operation(ABC):
    """Something that all members of a channel do together.

    Attributes:
        request: what the members agree on.
        done: whether it has ended on this rank, well or badly.
        submitted: when it was (time.perf_counter).
    """

    request: Request
    _buffers: Sequence[Buffer] = ()

    def __init__(self) -> None:
        self.done = False
        self.awaited = False  # by a thread that sleeps until it is done
        self.submitted = 0.0
        self._result: Any = None
        self._error: BaseException | None = None

    def end(self, result: Any, error: BaseException | None) -> None:
        """Note how it ended."""
        self._result, self._error = result, error
        self.done = True

    def outcome(self) -> Any:
        """Return the result of an operation that is done, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def nbytes(self) -> int:
        """How many bytes this rank contributes."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def awaited_since(self) -> float | None:
        """Return since when it waits for other ranks only; None while for this rank's program."""
        return self.submitted

    def abandon(self) -> None:  # noqa: B027  # most operations wait for nobody
        """Learn that this rank's program will do nothing more for it."""

    def buckets(self) -> Sequence[BucketTimes]:
        """Return when the buckets were reduced that it consists of, if any."""
        return ()

    @abstractmethod
    def execute(self, communicator: Communicator) -> Any:
        """Do it, when all members are known to have arrived; return the result."""

    def kin(self) -> Hashable:
        """Return what operations share that `execute_with` does together; None for none."""
        return None

    def execute_with(
        self,
        others: Sequence[Operation],
        communicator: Communicator,
        memory: npt.NDArray[np.uint8],
    ) -> None:
        """Do it together with its kin, by way of `memory` (which the engine has handed out)."""
        raise NotImplementedError


class Farewell(Operation):
    """A wish to take part no more: LEAVE ends the job's use of a channel, JOIN this rank's data.

    The result of JOIN is the rank that joined last.
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request

    def execute(self, communicator: Communicator) -> Any:
        return None
