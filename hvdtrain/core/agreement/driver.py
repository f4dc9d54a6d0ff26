"""The driver of a channel: performs the actions of its state machine on a communicator."""

from __future__ import annotations

import logging
import pickle
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from struct import Struct
from typing import Any

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.lifecycle import (
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
    Report,
    ReportsExchanged,
    RunRequests,
    Vote,
    Voted,
)
from hvdtrain.core.agreement.operation import (
    JOIN,
    LEAVE,
    LISTEN,
    AgreedError,
    Operation,
    Request,
    Work,
    ballot,
    maxima,
    unpacked,
)
from hvdtrain.core.agreement.queue import Queue
from hvdtrain.core.tuning import in_default_arithmetic
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import (
    HvdtrainError,
    MismatchError,
    PeerFailureError,
    SystemLimitError,
    UnsupportedError,
)
from hvdtrain.streams import HOST

# The hashes of a vote: of a member's next request, of all its requests, and of all of them sorted.
# For a single request they are equal. Full requests are exchanged only if all three differ.
HASHES = 3


@collective
def vote(
    communicator: Communicator, operations: Sequence[Operation], run: bool
) -> tuple[list[int], bool]:
    """Wait until every member votes, and find the operations in common, by their positions.

    With `run` they are run by the vote, if that is possible. Return whether they are done.
    """
    own, order = _vote_on(tuple([operation.request.ballot for operation in operations]))
    if run and _is_batch(operations):
        first, *others = [operations[position] for position in order]
        highest = first.vote(others, communicator, own)
    else:
        highest = maxima(communicator, own)
    return (common(own, order, highest), False) if highest else (order, True)


def _is_batch(operations: Sequence[Operation]) -> bool:
    """Return whether operations can run as one, or are one; on a device they do not."""
    key = operations[0].batch_key
    return len(operations) == 1 or (
        key is not None and all(o.batch_key == key and o.streams is HOST for o in operations)
    )


# A training loop submits the same requests again and again.
@lru_cache(maxsize=64)
def _vote_on(ballots: tuple[bytes, ...]) -> tuple[bytes, list[int]]:
    order = sorted(range(len(ballots)), key=ballots.__getitem__)
    in_order = ballot([ballots[position] for position in order])
    return ballots[0] + ballot(ballots) + in_order, order


def common(own: bytes, order: list[int], highest: bytes) -> list[int]:
    """Return the positions of requests that all members have, given the maxima of all votes."""
    # The maxima of hash and complement are both a member's own only if all hashes are equal.
    size = len(own) // HASHES
    if highest[size : 2 * size] == own[size : 2 * size]:
        return list(range(len(order)))
    if highest[2 * size :] == own[2 * size :]:
        return order
    return [0] if highest[:size] == own[:size] else []


# Time since the member joined, and bytes of the requests that have no number, which are at the end.
_HEADER = Struct("=di")

# Programs that give each operation another name must not fill the memory.
_MOST_NUMBERS = 4096


class ReportExchange:
    """Exchanges reports, in which requests that were exchanged before are numbers.

    All members number the requests in the same order, that of the reports in which they come first.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._requests: list[Request] = []
        self._numbers: dict[bytes, int] = {}  # by ballot

    @collective
    def __call__(self, own: Report) -> tuple[Report, ...]:
        messages = self._communicator.gather_bytes(self._packed(own))
        # Most ranks say the same.
        known = {message: self._unpacked(message) for message in dict.fromkeys(messages)}
        reports = tuple([known[message] for message in messages])
        if len(self._requests) > _MOST_NUMBERS:
            self._requests.clear()
            self._numbers.clear()
        return reports

    def _packed(self, own: Report) -> bytes:
        # Twice the number, plus one if the request is awaited; negative if it has no number yet.
        codes, unknown = array("i"), []
        for request in own.requests:
            number = self._numbers.get(request.ballot, -1)
            if number < 0:
                unknown.append(request.packed)
            codes.append(2 * number + (request.key in own.awaited))
        texts = pickle.dumps(unknown) if unknown else b""
        header = _HEADER.pack(own.joined_seconds, len(texts))
        return header + codes.tobytes() + texts

    def _unpacked(self, message: bytes) -> Report:
        joined_seconds, size = _HEADER.unpack_from(message)
        end = len(message) - size
        codes = array("i", message[_HEADER.size : end])
        texts: Iterator[bytes] = iter(pickle.loads(message[end:]) if size else ())
        requests = [self._requests[code >> 1] if code >= 0 else self._new(texts) for code in codes]
        awaited = [r.key for r, code in zip(requests, codes, strict=True) if code & 1]
        return Report(tuple(requests), frozenset(awaited), joined_seconds)

    def _new(self, texts: Iterator[bytes]) -> Request:
        """Number the next request, unless another member has reported it in the same exchange."""
        request = unpacked(next(texts))
        number = self._numbers.setdefault(request.ballot, len(self._requests))
        if number == len(self._requests):
            self._requests.append(request)
        return self._requests[number]


_logger = logging.getLogger("hvdtrain")

# Size of the memory in which small operations are run as a batch.
_BATCH_BYTES = 4 << 20

# What a member votes with that has no request.
_LISTENER = Work(LISTEN)


class Driver:
    """Calls a communicator from one thread at a time: the method of its name for each action."""

    def __init__(
        self,
        communicator: Communicator,
        queue: Queue,
        ranks: Sequence[int],
        title: str,
        answer: Callable[[Request], Operation],
        joined: Callable[[], None],
    ) -> None:
        self.communicator, self._queue = communicator, queue
        self._ranks, self._title = tuple(ranks), title
        self._answer, self._joined = answer, joined
        self._reports = ReportExchange(communicator)
        self._own: dict[str, Operation] = {}  # those that this rank has reported to the others
        self.doing: Sequence[Operation] = ()
        self._run_by_vote: Sequence[Operation] = ()  # and not ended yet
        self._memory: Buffer | None = None
        self._handlers: dict[type[Action], Callable[[Any], Event | None]] = {
            Vote: self._vote,
            ExchangeReports: self._exchange_reports,
            RunRequests: self._run_requests,
            Fail: lambda action: self._fail(action.reasons, MismatchError),
            Leave: self._leave,
            FailAll: lambda action: self._fail(
                dict.fromkeys(self._own, action.reason), PeerFailureError
            ),
            EndJoin: self._end_join,
            Notify: lambda action: queue.call_listeners(action.ranks),
            BackOff: lambda _: queue.back_off(),
        }

    @property
    def subject(self) -> str:
        """The first three of the operations that were run or proposed last, for messages."""
        subjects = [operation.request.subject for operation in self.doing[:3]]
        return ", ".join(subjects) or "a vote"

    @collective
    def round(self) -> None:
        """Take part in one round and perform its actions."""
        self._own, actions = self._queue.begin_round()
        self.doing = list(self._own.values())
        if self.doing and (track := self._queue.track) is not None:
            track.proposed(self.doing[0])
        self._perform(actions)

    @in_default_arithmetic
    @collective
    def follow(self, operation: Operation, highest: bytes) -> None:
        """Perform the actions of a round with one operation, given the maxima of all votes."""
        self.doing, self._own = (operation,), {operation.request.key: operation}
        requests = (operation.request,)
        agreed = common(operation.request.ballot * HASHES, [0], highest)
        self._perform(self._queue.apply(Voted(requests, requests if agreed else ())))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            event = self._handlers[type(action)](action)
            if event is not None:
                self._perform(self._queue.apply(event))

    @collective
    def _vote(self, action: Vote) -> Voted:
        requests, operations = action.requests, list(self._own.values()) or [_LISTENER]
        positions, done = vote(self.communicator, operations, not self._queue.timed)
        self._run_by_vote = [operations[position] for position in positions] if done else ()
        if len(positions) == len(requests) == 1:
            return Voted(requests, requests)
        return Voted(requests, tuple(requests[position] for position in positions))

    def _end_join(self, action: EndJoin) -> None:
        self._joined()
        self._queue.end(self._own[JOIN.key], result=action.order)

    def _exchange_reports(self, _: ExchangeReports) -> ReportsExchanged:
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

    def _run_requests(self, action: RunRequests) -> None:
        """Run operations of all members; successive ones with equal batch keys as a batch."""
        self._queue.reset_back_off()
        if self._run_by_vote:
            done, self._run_by_vote = self._run_by_vote, ()
            self._queue.end_all(done)
            return
        own, answer = self._own, self._answer
        operations = [own.get(request.key) or answer(request) for request in action.requests]
        keys = [operation.batch_key for operation in operations]
        start = 0
        for key, equal in groupby(keys):
            end = start + len(list(equal))
            batch, start = operations[start:end], end
            if key is not None and len(batch) > 1:
                self._execute_batch(batch)
            else:
                for operation in batch:
                    self._execute(operation)

    def _execute_batch(self, operations: Sequence[Operation]) -> None:
        self._began(operations)
        for operation in operations:
            if operation.streams is not HOST:
                operation.streams.settle(operation.mark)  # batches are in host memory
        first, *others = operations
        first.execute_batch(others, self.communicator, self._batch_memory)
        self._queue.end_all(operations)

    def _batch_memory(self) -> Buffer:
        if self._memory is None:
            self._memory = Buffer.of(self.communicator.empty(_BATCH_BYTES))
        return self._memory

    def _execute(self, operation: Operation) -> None:
        self._began([operation])
        try:
            if operation.streams is HOST:
                result = operation.execute(self.communicator)
            else:  # in their order
                work = partial(operation.execute, self.communicator)
                result, operation.finished = operation.streams.run_after(operation.mark, work)
        except AgreedError as error:
            self._queue.end(operation, error.error)
        # The engines of all members refuse it.
        except (SystemLimitError, UnsupportedError) as error:
            self._queue.end(operation, error)
        else:
            self._queue.end(operation, result=result)

    def _began(self, operations: Sequence[Operation]) -> None:
        self.doing = operations
        if (track := self._queue.track) is not None:
            for operation in operations:
                track.began(operation)
