"""Operations that a program runs again and again, whose vote is prepared."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.agreement.votes import agree_on_one
from hvdtrain.engines.communicator import Communicator, Verdict


class Prepared(Operation):
    """An operation that differs from call to call in its data, and in its number if it has no name.

    In the queue it stands for the operation while the members vote. One call at a time uses it.
    """

    def __init__(self, request: Request, next_name: Callable[[], str] | None = None) -> None:
        super().__init__()
        self.request, self.ballot = request, request.ballot
        self.waiters = 1  # the caller
        self._next_name = next_name

    def renew(self) -> None:
        """Begin the next call."""
        self.submitted = time.perf_counter()
        if self._next_name is not None:
            self.request = self.next_request()
            self.ballot = self.request.ballot

    def next_request(self) -> Request:
        """Return the request of the next call."""
        return self.request if self._next_name is None else self.request.renamed(self._next_name())

    @collective
    def vote(self, communicator: Communicator, data: Any) -> Verdict:
        """Vote on the operation, and run it at once if that is possible."""
        agreed = agree_on_one(communicator, self.ballot)
        return Verdict.AGREED if agreed else Verdict.DIFFERENT

    @abstractmethod
    def operation(self, data: Any) -> Operation:
        """Return the operation of this call, which then takes this one's place."""

    def execute(self, communicator: Communicator) -> Any:
        raise NotImplementedError  # another operation takes its place before anything runs
