"""The driver of a channel: performs the actions of its state machine on a communicator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.events import (
    Action,
    BackOff,
    EndJoin,
    Event,
    ExchangeReports,
    Fail,
    FailAll,
    Leave,
    Left,
    Notify,
    ReportsExchanged,
    RunRequests,
    Vote,
    Voted,
)
from hvdtrain.core.agreement.operation import AgreedError, Operation
from hvdtrain.core.agreement.prepared import Prepared
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.core.agreement.reports import ReportExchange
from hvdtrain.core.agreement.request import JOIN, LEAVE, Request
from hvdtrain.core.agreement.votes import unanimous, vote_on_batch
from hvdtrain.engines.communicator import Communicator, Verdict
from hvdtrain.errors import (
    HvdtrainError,
    MismatchError,
    PeerFailureError,
    SystemLimitError,
    UnsupportedError,
)
from hvdtrain.streams import HOST

_logger = logging.getLogger("hvdtrain")

# Size of the memory in which small operations are run as a batch.
_BATCH_BYTES = 4 << 20


class Driver:
    """Calls the primitives of a communicator, from one thread at a time."""

    def __init__(
        self,
        communicator: Communicator,
        queue: Queue,
        ranks: Sequence[int],
        title: str,
        answer: Callable[[Request], Operation],
        joined: Callable[[], None],
    ) -> None:
        self._communicator, self._queue = communicator, queue
        self._ranks, self._title = tuple(ranks), title
        self._answer, self._joined = answer, joined
        self._reports = ReportExchange(communicator)
        self._own: dict[str, Operation] = {}  # those that this rank has reported to the others
        self._doing: Sequence[Operation] = ()
        self._run_by_vote: Sequence[Operation] = ()  # and not ended yet
        self._memory: Buffer | None = None
        self._handlers: dict[type[Action], Callable[[Any], Event | None]] = {
            Vote: self._vote,
            ExchangeReports: self._exchange,
            RunRequests: self._run,
            Fail: lambda action: self._fail(action.reasons, MismatchError),
            Leave: self._leave,
            FailAll: self._fail_all,
            EndJoin: self._end_join,
            Notify: self._notify,
            BackOff: self._back_off,
        }

    @property
    def subject(self) -> str:
        """The first three of the operations that were run or proposed last, for messages."""
        subjects = [operation.request.subject for operation in self._doing[:3]]
        return ", ".join(subjects) or "a vote"

    def explained(self, error: BaseException) -> BaseException:
        """Return what an error means to the program; see `Communicator.explained`."""
        return self._communicator.explained(error)

    @collective
    def round(self) -> None:
        """Take part in one round and perform its actions."""
        self._own, actions = self._queue.begin_round()
        self._doing = list(self._own.values())
        if self._doing and (track := self._queue.track) is not None:
            track.proposed(self._doing[0])
        self._perform(actions)

    @collective
    def vote_prepared(self, prepared: Prepared, data: object) -> Verdict:
        """Take part in a round with a prepared operation alone."""
        self._doing = (prepared,)
        return prepared.vote(self._communicator, data)

    @collective
    def follow(self, operation: Operation, verdict: Verdict) -> None:
        """Perform the actions of a round whose prepared operation is not done."""
        self._doing, self._own = (operation,), {operation.request.key: operation}
        proposed = (operation.request,)
        agreed = proposed if verdict is Verdict.AGREED else ()
        self._perform(self._queue.apply(Voted(proposed, agreed)))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            event = self._handlers[type(action)](action)
            if event is not None:
                self._perform(self._queue.apply(event))

    def _vote(self, action: Vote) -> Voted:
        requests, operations = action.requests, list(self._own.values())
        # A timeline records when each operation begins.
        if self._queue.track is None and _is_batch(operations):
            positions, done = vote_on_batch(self._communicator, operations)
            self._run_by_vote = [operations[position] for position in positions] if done else ()
        else:
            positions = unanimous(self._communicator, requests)
        if len(positions) == len(requests) == 1:
            return Voted(requests, requests)
        return Voted(requests, tuple(requests[position] for position in positions))

    def _fail_all(self, action: FailAll) -> None:
        self._fail(dict.fromkeys(self._own, action.reason), PeerFailureError)

    def _end_join(self, action: EndJoin) -> None:
        self._joined()
        self._queue.end(self._own[JOIN.key], result=action.order)

    def _notify(self, _: Notify) -> None:
        self._queue.call_listeners()

    def _back_off(self, _: BackOff) -> None:
        self._queue.back_off()

    def _exchange(self, _: ExchangeReports) -> ReportsExchanged:
        operations, own = self._queue.report()
        self._own = {operation.request.key: operation for operation in operations}
        reports = self._reports(own)
        if (track := self._queue.track) is not None:
            track.agreed()
        return ReportsExchanged(reports, self._ranks, own)

    def _fail(self, reasons: Mapping[str, str], error: type[HvdtrainError]) -> None:
        self._queue.reset_back_off()
        for key, reason in reasons.items():
            if (operation := self._own.get(key)) is not None:
                self._end_with(operation, reason, error)

    def _leave(self, action: Leave) -> Left:
        for key, reason in action.unmet.items():
            if (operation := self._own.get(key)) is not None:
                self._end_with(operation, reason, PeerFailureError)
        self._queue.end(self._own[LEAVE.key])
        return Left()

    def _end_with(self, operation: Operation, reason: str, error: type[HvdtrainError]) -> None:
        message = f"{self._title} {operation.request.subject}: {reason}"
        # A program that leaves or joins may never ask for its result.
        if not operation.waiters and (LEAVE.key in self._own or JOIN.key in self._own):
            _logger.warning(message)
        self._queue.end(operation, error(message))

    def _run(self, action: RunRequests) -> None:
        """Run operations of all members; successive ones with equal batch keys as a batch."""
        self._queue.reset_back_off()
        if self._run_by_vote:
            done, self._run_by_vote = self._run_by_vote, ()
            self._queue.end_all(done)
            return
        own, answer = self._own, self._answer
        operations = [own.get(request.key) or answer(request) for request in action.requests]
        keys = [operation.batch_key() for operation in operations]
        start = 0
        for key, equal in groupby(keys):
            end = start + len(list(equal))
            batch, start = operations[start:end], end
            if key is not None and len(batch) > 1:
                self._run_batch(batch)
            else:
                for operation in batch:
                    self._run_one(operation)

    def _run_batch(self, operations: Sequence[Operation]) -> None:
        self._began(operations)
        for operation in operations:
            if operation.streams is not HOST:
                operation.streams.settle(operation.mark)  # batches are in host memory
        first, *others = operations
        first.execute_batch(others, self._communicator, self._batch_memory)
        self._queue.end_all(operations)

    def _batch_memory(self) -> Buffer:
        if self._memory is None:
            self._memory = Buffer.of(self._communicator.empty(_BATCH_BYTES))
        return self._memory

    def _run_one(self, operation: Operation) -> None:
        self._began([operation])
        try:
            result = operation.run(self._communicator)
        except AgreedError as error:
            self._queue.end(operation, error.error)
        # The engines of all members refuse it.
        except (SystemLimitError, UnsupportedError) as error:
            self._queue.end(operation, error)
        else:
            self._queue.end(operation, result=result)

    def _began(self, operations: Sequence[Operation]) -> None:
        self._doing = operations
        if (track := self._queue.track) is not None:
            for operation in operations:
                track.began(operation)


def _is_batch(operations: Sequence[Operation]) -> bool:
    """Return whether these operations, in host memory, can run as one."""
    key = operations[0].batch_key() if operations else None
    return key is not None and all(o.batch_key() == key and o.streams is HOST for o in operations)
